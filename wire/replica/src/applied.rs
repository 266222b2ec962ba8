//! Which requests of clients are applied, so that a retry applies once; and the sessions of clients.
//!
//! A client with a session is remembered until its session ends. What it sends afterwards is refused, so that
//! nothing applies twice, however many clients there are. Clients of versions without sessions are remembered
//! as long as there is room.

use std::collections::BTreeMap;

use codec::DecodeError;
use wire_store::EntryHeader;

use crate::SessionChange;
use crate::decode::Fields;

/// Newest numbers of a client that are told apart. The numbers that a client has in flight differ by less.
pub const CLIENT_WINDOW: u64 = 512;
/// Most clients that are remembered.
pub const CLIENTS_MAX: usize = 1400;
/// Of these, most with a session. Another one is refused. The rest is for clients without, of which the one
/// that wrote least recently is forgotten first.
pub const SESSIONS_MAX: usize = 1344;
/// Most volumes without a session whose attach epoch is remembered.
const FENCES_MAX: usize = 384;

const WORDS: usize = CLIENT_WINDOW as usize / 64;
/// Bytes of a client in the encoding, and of a volume without a session.
const CLIENT_BYTES: usize = 40 + WORDS * 8;
const FENCE_BYTES: usize = 24;
/// Says that the encoding has sessions.
const WITH_SESSIONS: u32 = 1 << 31;
const HAS_SESSION: u32 = 1;

/// The encoding without sessions: its numbers of a client, its clients, and bytes of each.
const OLD_WINDOW: u64 = 1024;
const OLD_CLIENTS_MAX: usize = 1024;
const OLD_CLIENT_BYTES: usize = 24 + OLD_WINDOW as usize / 8;

/// What is known about a request's number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RequestSeen {
    /// It is not applied.
    New,
    /// It is applied.
    Applied,
    /// The client has a number that is higher by [`CLIENT_WINDOW`] or more: this one may be applied or not.
    TooOld,
    /// The client has no session, which its request needs: it has ended. The request may be applied or not.
    SessionEnded,
    /// The image was attached again since, by another client: the request is not applied from now on.
    Fenced,
    /// There are as many sessions as there may be.
    TooManySessions,
    /// The volume is written by clients with sessions, and this one has none.
    InUse,
}

/// The requests that are applied, by client. It changes only with committed entries in their order, so it is the same on
/// every replica at the same commit point. Memory: [`CLIENTS_MAX`] times 120 bytes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AppliedRequests {
    clients: BTreeMap<u64, AppliedOfClient>,
    /// Clients with a session.
    sessions: usize,
    volumes: BTreeMap<u64, VolumeAttach>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct AppliedOfClient {
    newest: u64,
    /// Bit `number % CLIENT_WINDOW`, of the numbers from `newest - CLIENT_WINDOW + 1` to `newest`.
    applied: [u64; WORDS],
    /// Sequence of the entry that opened its session; without one, of its last entry.
    sequence: u64,
    session: Option<ClientSession>,
}

/// A session: the volume that the client writes, at the attach epoch of its image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClientSession {
    /// The volume.
    pub volume: u64,
    /// The attach epoch.
    pub attach_epoch: u32,
}

/// What is known of a volume that clients with sessions write, or wrote.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct VolumeAttach {
    /// The highest attach epoch. All its sessions have this one.
    epoch: u32,
    sessions: u32,
    /// Of the entry that ended the last session; 0 while there is one.
    sequence: u64,
}

impl AppliedOfClient {
    fn new(newest: u64, sequence: u64) -> AppliedOfClient {
        AppliedOfClient { newest, applied: [0; WORDS], sequence, session: None }
    }

    /// Whether a request with this token is of its session. 0 is that of a session which a node of a version
    /// without opened.
    fn has_token(&self, token: u64) -> bool {
        token == 0 || token as u32 == self.sequence as u32
    }

    fn bit(number: u64) -> (usize, u64) {
        let index = number % CLIENT_WINDOW;
        ((index / 64) as usize, 1 << (index % 64))
    }

    fn record(&mut self, number: u64) {
        if number > self.newest {
            let skipped = (number - self.newest).min(CLIENT_WINDOW);
            for old in 0..skipped {
                let (word, bit) = AppliedOfClient::bit(number - old);
                self.applied[word] &= !bit;
            }
            self.newest = number;
        } else if self.newest - number >= CLIENT_WINDOW {
            return;
        }
        let (word, bit) = AppliedOfClient::bit(number);
        self.applied[word] |= bit;
    }

    fn seen(&self, number: u64) -> RequestSeen {
        if number > self.newest {
            return RequestSeen::New;
        }
        if self.newest - number >= CLIENT_WINDOW {
            return RequestSeen::TooOld;
        }
        if self.has(number) { RequestSeen::Applied } else { RequestSeen::New }
    }

    fn has(&self, number: u64) -> bool {
        let (word, bit) = AppliedOfClient::bit(number);
        self.applied[word] & bit != 0
    }

    /// The numbers that are told apart.
    fn window(&self) -> std::ops::RangeInclusive<u64> {
        (self.newest + 1).saturating_sub(CLIENT_WINDOW)..=self.newest
    }
}

impl AppliedRequests {
    /// Whether a request of a client is applied. Requests of client 0 have no numbers and are always new; so
    /// are those of clients that are not known.
    pub fn seen(&self, client: u64, number: u64) -> RequestSeen {
        self.clients.get(&client).map_or(RequestSeen::New, |known| known.seen(number))
    }

    /// What becomes of a request that is to go to the log. Its epoch is the attach epoch of the client's
    /// session, 0 if the client needs none; its sequence is the session's [token](Self::token).
    pub fn admit(&self, header: &EntryHeader) -> RequestSeen {
        let (client, attach_epoch) = (header.client, header.epoch);
        match SessionChange::of(header) {
            Some(SessionChange::Open { volume, attach_epoch }) => {
                self.admit_open(client, volume, attach_epoch)
            }
            Some(SessionChange::End { .. }) => match self.session(client) {
                Some(_) => RequestSeen::New,
                None => RequestSeen::Applied,
            },
            None => {
                let known = self.clients.get(&client);
                let volume = header.object.volume;
                match (known, attach_epoch) {
                    (Some(known @ AppliedOfClient { session: Some(session), .. }), _) => {
                        match session.volume == volume && known.has_token(header.sequence) {
                            true => known.seen(header.client_number),
                            false => RequestSeen::SessionEnded,
                        }
                    }
                    (_, 1..) if self.volumes.get(&volume).is_some_and(|it| it.epoch > attach_epoch) => {
                        RequestSeen::Fenced
                    }
                    // A node of a version without sessions took it: it is told apart as then.
                    (Some(known), 1..) => known.seen(header.client_number),
                    (None, 1..) => RequestSeen::SessionEnded,
                    (_, 0) if client != 0 && self.volumes.get(&volume).is_some_and(|it| it.sessions > 0) => {
                        RequestSeen::InUse
                    }
                    (known, 0) => known.map_or(RequestSeen::New, |known| known.seen(header.client_number)),
                }
            }
        }
    }

    fn admit_open(&self, client: u64, volume: u64, attach_epoch: u32) -> RequestSeen {
        if let Some(attach) = self.volumes.get(&volume)
            && attach.epoch > attach_epoch
        {
            return RequestSeen::Fenced;
        }
        match self.session(client) {
            Some(session) if session == (ClientSession { volume, attach_epoch }) => RequestSeen::Applied,
            // Of another volume, or at another epoch: no client has two.
            Some(_) => RequestSeen::SessionEnded,
            None if self.sessions >= SESSIONS_MAX => RequestSeen::TooManySessions,
            None => RequestSeen::New,
        }
    }

    /// The session of a client.
    pub fn session(&self, client: u64) -> Option<ClientSession> {
        self.clients.get(&client)?.session
    }

    /// The token of a client's session, which its requests carry: a session that a late repetition of the
    /// first request opens again has another one, so that late repetitions of other requests find none.
    pub fn token(&self, client: u64) -> Option<u32> {
        let known = self.clients.get(&client)?;
        known.session.map(|_| known.sequence as u32)
    }

    /// The clients that have sessions, and these.
    pub fn sessions(&self) -> impl Iterator<Item = (u64, ClientSession)> {
        self.clients.iter().filter_map(|(client, known)| Some((*client, known.session?)))
    }

    /// Whether the session in which a client wrote a volume has ended, as far as known: what it wrote and was
    /// not committed before must not take effect any more. The write was to be the entry with this sequence.
    pub fn has_ended(&self, client: u64, volume: u64, sequence: u64) -> bool {
        let is_open = self.clients.get(&client).is_some_and(|known| {
            known.sequence < sequence && known.session.is_some_and(|session| session.volume == volume)
        });
        client != 0 && !is_open && self.volumes.contains_key(&volume)
    }

    /// How many clients have sessions.
    pub fn session_count(&self) -> usize {
        self.sessions
    }

    /// An entry is committed.
    pub fn apply(&mut self, header: &EntryHeader) {
        let EntryHeader { client, client_number, sequence, .. } = *header;
        match SessionChange::of(header) {
            None => self.record(client, client_number, sequence),
            Some(_) if client == 0 => {}
            Some(SessionChange::Open { volume, attach_epoch }) => {
                // Others may have been opened since it was admitted.
                if self.admit_open(client, volume, attach_epoch) == RequestSeen::New {
                    self.open(client, ClientSession { volume, attach_epoch }, sequence);
                }
            }
            Some(SessionChange::End { .. }) => self.end(client, sequence),
        }
    }

    fn open(&mut self, client: u64, session: ClientSession, sequence: u64) {
        let ClientSession { volume, attach_epoch } = session;
        if self.volumes.get(&volume).is_some_and(|it| it.epoch < attach_epoch && it.sessions > 0) {
            let fenced = self.sessions().filter(|(_, other)| other.volume == volume);
            let fenced: Vec<u64> = fenced.map(|(client, _)| client).collect();
            fenced.into_iter().for_each(|client| self.end(client, sequence));
        }
        self.make_room(client);
        let known = self.clients.entry(client).or_insert(AppliedOfClient::new(0, sequence));
        (known.session, known.sequence) = (Some(session), sequence);
        self.sessions += 1;
        let attach =
            self.volumes.entry(volume).or_insert(VolumeAttach { epoch: 0, sessions: 0, sequence: 0 });
        attach.sessions += 1;
        (attach.epoch, attach.sequence) = (attach_epoch, 0);
    }

    fn end(&mut self, client: u64, sequence: u64) {
        let Some(ClientSession { volume, .. }) = self.session(client) else { return };
        self.clients.remove(&client);
        self.sessions -= 1;
        let attach = self.volumes.get_mut(&volume).expect("a volume with a session");
        attach.sessions -= 1;
        if attach.sessions > 0 {
            return;
        }
        attach.sequence = sequence;
        let idle = self.volumes.iter().filter(|(_, attach)| attach.sessions == 0);
        if idle.clone().count() > FENCES_MAX {
            let oldest = idle.min_by_key(|(_, attach)| attach.sequence).map(|(volume, _)| *volume);
            self.volumes.remove(&oldest.expect("there are some"));
        }
    }

    /// Forgets a client without a session if there is no room for another one.
    fn make_room(&mut self, client: u64) {
        if self.clients.len() < CLIENTS_MAX || self.clients.contains_key(&client) {
            return;
        }
        let without = self.clients.iter().filter(|(_, known)| known.session.is_none());
        let oldest = without.min_by_key(|(_, known)| known.sequence).map(|(id, _)| *id);
        self.clients.remove(&oldest.expect("some have no session"));
    }

    /// The entry with this sequence, which concerns data, is committed.
    pub fn record(&mut self, client: u64, number: u64, sequence: u64) {
        if client == 0 {
            return;
        }
        self.make_room(client);
        let known = self.clients.entry(client).or_insert(AppliedOfClient::new(number, sequence));
        known.record(number);
        if known.session.is_none() {
            known.sequence = sequence;
        }
    }

    /// Most bytes of an encoding.
    pub const ENCODED_BYTES_MAX: usize = {
        let with_sessions = 8 + CLIENTS_MAX * CLIENT_BYTES + FENCES_MAX * FENCE_BYTES;
        let old = 4 + OLD_CLIENTS_MAX * OLD_CLIENT_BYTES;
        // Where an encoding is stored has room for the old one.
        assert!(with_sessions <= old);
        old
    };

    /// Appends the encoding: the number of clients and 2^31, the number of volumes without a session, then
    /// each client with its window and its session, and each of these volumes with its attach epoch.
    pub fn encode(&self, out: &mut Vec<u8>) {
        let idle = self.volumes.iter().filter(|(_, attach)| attach.sessions == 0);
        let fences = idle.clone().count();
        out.reserve(8 + self.clients.len() * CLIENT_BYTES + fences * FENCE_BYTES);
        out.extend_from_slice(&(self.clients.len() as u32 | WITH_SESSIONS).to_le_bytes());
        out.extend_from_slice(&(fences as u32).to_le_bytes());
        for (client, known) in &self.clients {
            let ClientSession { volume, attach_epoch } =
                known.session.unwrap_or(ClientSession { volume: 0, attach_epoch: 0 });
            let flags = if known.session.is_some() { HAS_SESSION } else { 0 };
            let epoch_and_flags = u64::from(attach_epoch) | u64::from(flags) << 32;
            let numbers = [*client, known.newest, known.sequence, volume, epoch_and_flags];
            let numbers = numbers.into_iter().chain(known.applied);
            numbers.for_each(|number| out.extend_from_slice(&number.to_le_bytes()));
        }
        for (volume, attach) in idle {
            for number in [*volume, attach.epoch.into(), attach.sequence] {
                out.extend_from_slice(&number.to_le_bytes());
            }
        }
    }

    /// Appends the encoding for versions without sessions: the number of clients, then each with its window.
    /// Of more clients than it has, those that wrote last.
    pub fn encode_without_sessions(&self, out: &mut Vec<u8>) {
        let mut clients: Vec<_> = self.clients.iter().collect();
        clients.sort_unstable_by_key(|(_, known)| std::cmp::Reverse(known.sequence));
        clients.truncate(OLD_CLIENTS_MAX);
        clients.sort_unstable_by_key(|(client, _)| **client);
        out.reserve(4 + clients.len() * OLD_CLIENT_BYTES);
        out.extend_from_slice(&(clients.len() as u32).to_le_bytes());
        for (client, known) in clients {
            let mut applied = [0_u64; OLD_WINDOW as usize / 64];
            for number in known.window().filter(|number| known.has(*number)) {
                let index = number % OLD_WINDOW;
                applied[(index / 64) as usize] |= 1 << (index % 64);
            }
            let numbers = [*client, known.newest, known.sequence].into_iter().chain(applied);
            numbers.for_each(|number| out.extend_from_slice(&number.to_le_bytes()));
        }
    }

    /// Decodes what [`encode`](Self::encode) or [`encode_without_sessions`](Self::encode_without_sessions)
    /// appended, and nothing else.
    ///
    /// # Errors
    /// A wrong length, or clients that are not in their order.
    pub fn decode(from: &[u8]) -> Result<AppliedRequests, DecodeError> {
        let mut fields = Fields::new(from);
        let applied = AppliedRequests::decode_fields(&mut fields)?;
        match fields.rest() {
            0 => Ok(applied),
            rest => {
                let need = from.len() - rest;
                Err(DecodeError::Length { what: "the applied requests", got: from.len(), need })
            }
        }
    }

    pub(crate) fn decode_fields(from: &mut Fields) -> Result<AppliedRequests, DecodeError> {
        let count = from.u32()?;
        let mut applied = AppliedRequests::default();
        if count & WITH_SESSIONS == 0 {
            if count as usize > OLD_CLIENTS_MAX || from.rest() < count as usize * OLD_CLIENT_BYTES {
                return Err(DecodeError::value("the number of clients", 0, count.into()));
            }
            for _ in 0..count {
                let (client, known) = AppliedOfClient::decode_without_session(from)?;
                applied.insert(client, known)?;
            }
            return Ok(applied);
        }
        let (clients, fences) = ((count & !WITH_SESSIONS) as usize, from.u32()? as usize);
        let is_in_limits = clients <= CLIENTS_MAX && fences <= FENCES_MAX;
        if !is_in_limits || from.rest() < clients * CLIENT_BYTES + fences * FENCE_BYTES {
            return Err(DecodeError::value("the number of clients", 0, count.into()));
        }
        for _ in 0..clients {
            let (client, known) = AppliedOfClient::decode(from)?;
            applied.insert(client, known)?;
        }
        let mut last = None;
        for _ in 0..fences {
            let (volume, epoch, sequence) =
                (from.u64()?, from.u64()?, from.number("the sequence of a volume")?);
            let epoch = u32::try_from(epoch).map_err(|_| DecodeError::value("an attach epoch", 8, epoch))?;
            let attach = VolumeAttach { epoch, sessions: 0, sequence };
            let is_new = applied.volumes.insert(volume, attach).is_none();
            if !is_new || last.replace(volume).is_some_and(|last| volume <= last) {
                return Err(DecodeError::value("a volume of the applied requests", 8, volume));
            }
        }
        Ok(applied)
    }

    /// Adds a client that was decoded, in their order.
    fn insert(&mut self, client: u64, known: AppliedOfClient) -> Result<(), DecodeError> {
        let is_in_order = self.clients.last_key_value().is_none_or(|(last, _)| *last < client);
        if client == 0 || !is_in_order {
            return Err(DecodeError::value("a client of the applied requests", 4, client));
        }
        if let Some(ClientSession { volume, attach_epoch }) = known.session {
            self.sessions += 1;
            let new = VolumeAttach { epoch: attach_epoch, sessions: 0, sequence: 0 };
            let attach = self.volumes.entry(volume).or_insert(new);
            attach.sessions += 1;
            if attach.epoch != attach_epoch || self.sessions > SESSIONS_MAX {
                return Err(DecodeError::value("the session of a client", 4, client));
            }
        }
        self.clients.insert(client, known);
        Ok(())
    }
}

impl AppliedOfClient {
    fn decode(from: &mut Fields) -> Result<(u64, AppliedOfClient), DecodeError> {
        let client = from.u64()?;
        let newest = from.number("the newest request of a client")?;
        let mut known = AppliedOfClient::new(newest, from.number("the sequence of a client")?);
        let (volume, attach_epoch, flags) = (from.u64()?, from.u32()?, from.u32()?);
        known.session = match (flags, volume, attach_epoch) {
            (0, 0, 0) => None,
            (HAS_SESSION, ..) => Some(ClientSession { volume, attach_epoch }),
            _ => return Err(DecodeError::value("the flags of a client", 36, flags.into())),
        };
        for word in &mut known.applied {
            *word = from.u64()?;
        }
        Ok((client, known))
    }

    fn decode_without_session(from: &mut Fields) -> Result<(u64, AppliedOfClient), DecodeError> {
        let client = from.u64()?;
        let newest = from.number("the newest request of a client")?;
        let mut known = AppliedOfClient::new(newest, from.number("the sequence of a client")?);
        let mut applied = [0_u64; OLD_WINDOW as usize / 64];
        for word in &mut applied {
            *word = from.u64()?;
        }
        for number in known.window() {
            let index = number % OLD_WINDOW;
            if applied[(index / 64) as usize] >> (index % 64) & 1 != 0 {
                let (word, bit) = AppliedOfClient::bit(number);
                known.applied[word] |= bit;
            }
        }
        Ok((client, known))
    }
}

#[cfg(test)]
mod tests;
