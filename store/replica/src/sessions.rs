//! Sessions of clients, at the primary: which requests are admitted, and which sessions end because their
//! client is silent.
//!
//! A session is opened and ended by an entry of the log, so that every replica knows the same. Time is no
//! part of that: the primary ends a session with an entry when it has not heard of it for
//! [`ReplicaSettings::session_timeout_ns`], counted by its own clock from when it became primary at the
//! earliest. So a session lives longer after a change of the primary, never shorter.
//!
//! [`ReplicaSettings::session_timeout_ns`]: crate::ReplicaSettings::session_timeout_ns

use std::collections::VecDeque;

use foldhash::HashMap;
use wire_replica::{SessionChange, is_data_object};
use wire_store::EntryHeader;

use crate::log::EntryLog;
use crate::replica::{Replica, Role};
use crate::{ClientReply, PlantedReplicaFault, Plants, ReplicaAction, RequestSeen};

/// In one timeout the primary looks for silent clients this many times.
const CHECKS_PER_TIMEOUT: u64 = 8;
/// The number of an entry that ends a session of a silent client: no request has it, so that its commit
/// answers none.
const TIMEOUT_NUMBER: u64 = 0;

/// What a primary knows of sessions besides the table.
pub(crate) struct PrimarySessions {
    /// Changes in the log that are not committed: sequence, client, change.
    pending: VecDeque<(u64, u64, SessionChange)>,
    /// When a client last said that it lives.
    heard: HashMap<u64, u64>,
    /// When this began to listen.
    since_ns: u64,
    check_ns: u64,
}

impl PrimarySessions {
    pub(crate) fn new(log: &EntryLog, commit_point: u64, now_ns: u64) -> PrimarySessions {
        let uncommitted = (commit_point + 1..=log.end()).filter_map(|sequence| log.get(sequence));
        let change =
            |header: &EntryHeader| Some((header.sequence, header.client, SessionChange::of(header)?));
        PrimarySessions {
            pending: uncommitted.filter_map(|entry| change(&entry.header)).collect(),
            heard: HashMap::default(),
            since_ns: now_ns,
            check_ns: now_ns,
        }
    }

    /// An entry is appended.
    pub(crate) fn appended(&mut self, header: &EntryHeader) {
        if let Some(change) = SessionChange::of(header) {
            self.pending.push_back((header.sequence, header.client, change));
        }
    }

    /// Entries up to a sequence are committed.
    pub(crate) fn committed(&mut self, through: u64) {
        while self.pending.pop_front_if(|(sequence, ..)| *sequence <= through).is_some() {}
    }

    /// Whether a change that is not committed may refuse a request that is new so far.
    fn may_refuse(&self, header: &EntryHeader) -> bool {
        let (volume, attach_epoch) = match SessionChange::of(header) {
            Some(SessionChange::Open { volume, attach_epoch }) => (volume, attach_epoch),
            Some(SessionChange::End { volume }) => (volume, u32::MAX),
            None => (header.object.volume, header.epoch),
        };
        self.pending.iter().any(|(_, client, change)| match *change {
            SessionChange::Open { volume: of, attach_epoch: opened } => {
                *client == header.client || (of == volume && opened > attach_epoch)
            }
            SessionChange::End { .. } => *client == header.client,
        })
    }

    fn has_end_of(&self, client: u64) -> bool {
        self.pending
            .iter()
            .any(|(_, of, change)| *of == client && matches!(change, SessionChange::End { .. }))
    }
}

impl<F: Plants> Replica<F> {
    /// The answer to a request that does not go to the log: it is applied, or refused.
    pub(crate) fn refusal(&mut self, header: &EntryHeader) -> Option<ClientReply> {
        let change = SessionChange::of(header);
        if change.is_none() && !is_data_object(header.object) {
            return Some(ClientReply::Failed);
        }
        let seen = match self.applied.admit(header) {
            // The planted errors: a client that is not known counts as new, and an attach epoch as none.
            RequestSeen::SessionEnded if self.has_fault(PlantedReplicaFault::ForgetLiveSession) => {
                RequestSeen::New
            }
            RequestSeen::Fenced
                if change.is_none() && self.has_fault(PlantedReplicaFault::AttachUnfenced) =>
            {
                RequestSeen::New
            }
            seen => seen,
        };
        let now_ns = self.now_ns;
        let is_unfenced = change.is_none() && self.has_fault(PlantedReplicaFault::AttachUnfenced);
        let sessions = &mut self.primary().sessions;
        if change.is_some() {
            sessions.heard.insert(header.client, now_ns);
        }
        match seen {
            RequestSeen::New if !is_unfenced && sessions.may_refuse(header) => Some(ClientReply::Busy),
            RequestSeen::New => None,
            RequestSeen::Applied => Some(self.reply_to_committed(header)),
            RequestSeen::TooOld => Some(ClientReply::TooOld),
            // It may be open soon.
            RequestSeen::SessionEnded if sessions.may_refuse(header) => Some(ClientReply::Busy),
            RequestSeen::SessionEnded => Some(ClientReply::SessionEnded),
            RequestSeen::Fenced => Some(ClientReply::Fenced),
            RequestSeen::TooManySessions => Some(ClientReply::TooManySessions),
            RequestSeen::InUse => Some(ClientReply::Denied),
        }
    }

    /// The answer to a request that is committed.
    pub(crate) fn reply_to_committed(&self, header: &EntryHeader) -> ClientReply {
        match SessionChange::of(header) {
            Some(SessionChange::Open { .. }) => match self.applied.token(header.client) {
                Some(token) => ClientReply::SessionOpened { token },
                // It was fenced, or the last place was taken, since it was admitted.
                None => ClientReply::Busy,
            },
            _ => ClientReply::Written,
        }
    }

    /// Ends the sessions of clients that are silent.
    pub(crate) fn run_sessions(&mut self, actions: &mut Vec<ReplicaAction>) {
        let Role::Primary(primary) = &mut self.role else { return };
        if self.now_ns < primary.sessions.check_ns || self.applied.session_count() == 0 {
            return;
        }
        let (now_ns, timeout_ns) = (self.now_ns, self.settings.session_timeout_ns);
        let sessions = &mut primary.sessions;
        sessions.check_ns = now_ns + (timeout_ns / CHECKS_PER_TIMEOUT).max(1);
        if primary.is_comparing {
            // An entry of this epoch would make this log the newest one.
            return;
        }
        let (since_ns, applied) = (sessions.since_ns, &self.applied);
        sessions.heard.retain(|client, _| applied.session(*client).is_some());
        let is_silent = |client: u64| {
            let heard_ns = sessions.heard.get(&client).copied().unwrap_or(0).max(since_ns);
            now_ns >= heard_ns + timeout_ns && !sessions.has_end_of(client)
        };
        let silent: Vec<_> = applied.sessions().filter(|(client, _)| is_silent(*client)).collect();
        for (client, session) in silent {
            if self.log.len() >= self.settings.entries_max {
                return;
            }
            let header = SessionChange::End { volume: session.volume }.header(self.settings.group);
            let header = EntryHeader { client, client_number: TIMEOUT_NUMBER, ..header };
            self.append_as_primary(header, [].into(), actions);
        }
    }

    /// When silent clients are looked for next.
    pub(crate) fn sessions_deadline(&self, sessions: &PrimarySessions) -> u64 {
        if self.applied.session_count() == 0 { u64::MAX } else { sessions.check_ns }
    }

    /// The planted error: of more than two sessions, one is forgotten.
    pub(crate) fn forget_session(&mut self, sequence: u64) {
        if !self.has_fault(PlantedReplicaFault::ForgetLiveSession) || self.applied.session_count() <= 2 {
            return;
        }
        let oldest = self.applied.sessions().next();
        if let Some((client, session)) = oldest {
            let header = SessionChange::End { volume: session.volume }.header(0);
            self.applied.apply(&EntryHeader { client, sequence, ..header });
        }
    }
}
