//! Which requests of clients are applied, so that a retry applies once.

use std::collections::BTreeMap;

use codec::DecodeError;

use crate::decode::Fields;

/// Newest numbers of a client that are told apart. A client has fewer requests in flight.
pub const CLIENT_WINDOW: u64 = 1024;
/// Most clients that are remembered; the one that wrote least recently is forgotten first.
pub const CLIENTS_MAX: usize = 1024;

const WORDS: usize = CLIENT_WINDOW as usize / 64;
/// Bytes of a client in the encoding.
const CLIENT_BYTES: usize = 24 + WORDS * 8;

/// What is known about a request's number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RequestSeen {
    /// It is not applied.
    New,
    /// It is applied.
    Applied,
    /// The client has a number that is higher by [`CLIENT_WINDOW`] or more: this one may be applied or not.
    TooOld,
}

/// The requests that are applied, by client. It changes only with committed entries in their order, so it is the same on
/// every replica at the same commit point. Memory: [`CLIENTS_MAX`] times 160 bytes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AppliedRequests {
    clients: BTreeMap<u64, AppliedOfClient>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct AppliedOfClient {
    newest: u64,
    /// Bit `number % CLIENT_WINDOW`, of the numbers from `newest - CLIENT_WINDOW + 1` to `newest`.
    applied: [u64; WORDS],
    /// Sequence of its last entry.
    sequence: u64,
}

impl AppliedOfClient {
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
}

impl AppliedRequests {
    /// Whether a request is applied. Requests of client 0 have no numbers and are always new.
    pub fn seen(&self, client: u64, number: u64) -> RequestSeen {
        let Some(known) = self.clients.get(&client) else {
            return RequestSeen::New;
        };
        if number > known.newest {
            return RequestSeen::New;
        }
        if known.newest - number >= CLIENT_WINDOW {
            return RequestSeen::TooOld;
        }
        let (word, bit) = AppliedOfClient::bit(number);
        if known.applied[word] & bit == 0 { RequestSeen::New } else { RequestSeen::Applied }
    }

    /// The entry with this sequence is committed.
    pub fn record(&mut self, client: u64, number: u64, sequence: u64) {
        if client == 0 {
            return;
        }
        if !self.clients.contains_key(&client) && self.clients.len() >= CLIENTS_MAX {
            let oldest = self.clients.iter().min_by_key(|(_, known)| known.sequence).map(|(id, _)| *id);
            self.clients.remove(&oldest.expect("there are clients"));
        }
        let known = self.clients.entry(client).or_insert(AppliedOfClient {
            newest: number,
            applied: [0; WORDS],
            sequence,
        });
        known.record(number);
        known.sequence = sequence;
    }

    /// Bytes of the encoding with this many clients.
    pub const fn encoded_bytes(clients: usize) -> usize {
        4 + clients * CLIENT_BYTES
    }

    /// Appends the encoding: the number of clients, then each with its window.
    pub fn encode(&self, out: &mut Vec<u8>) {
        out.reserve(AppliedRequests::encoded_bytes(self.clients.len()));
        out.extend_from_slice(&(self.clients.len() as u32).to_le_bytes());
        for (client, known) in &self.clients {
            let numbers = [*client, known.newest, known.sequence].into_iter().chain(known.applied);
            numbers.for_each(|number| out.extend_from_slice(&number.to_le_bytes()));
        }
    }

    /// Decodes what [`encode`](Self::encode) appended, and nothing else.
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
        if count as usize > CLIENTS_MAX || from.rest() < count as usize * CLIENT_BYTES {
            return Err(DecodeError::value("the number of clients", 0, count.into()));
        }
        let mut clients = BTreeMap::new();
        for _ in 0..count {
            let client = from.u64()?;
            let newest = from.number("the newest request of a client")?;
            let sequence = from.number("the sequence of a client")?;
            let mut applied = [0; WORDS];
            for word in &mut applied {
                *word = from.u64()?;
            }
            if client == 0 || clients.last_key_value().is_some_and(|(last, _)| client <= *last) {
                return Err(DecodeError::value("a client of the applied requests", 4, client));
            }
            clients.insert(client, AppliedOfClient { newest, applied, sequence });
        }
        Ok(AppliedRequests { clients })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_is_new_once_until_the_window_has_passed_it() {
        let mut applied = AppliedRequests::default();
        let mut oracle = std::collections::BTreeSet::new();
        let mut random = random::WyRand::new(1);
        let mut newest = 5000;
        for sequence in 0..20_000 {
            let number = newest + random.below(30) - random.below(1200).min(newest);
            let expected = match (number + CLIENT_WINDOW <= newest, oracle.contains(&number)) {
                (true, _) if sequence > 0 => RequestSeen::TooOld,
                (_, true) => RequestSeen::Applied,
                _ => RequestSeen::New,
            };
            assert_eq!(applied.seen(7, number), expected, "{number} of {newest}");
            if expected == RequestSeen::New {
                applied.record(7, number, sequence);
                oracle.insert(number);
                newest = if sequence == 0 { number } else { newest.max(number) };
            }
        }
    }

    #[test]
    fn the_client_that_wrote_least_recently_is_forgotten() {
        let mut applied = AppliedRequests::default();
        let clients = CLIENTS_MAX as u64;
        for client in 1..=clients {
            applied.record(client, 1, client);
        }
        applied.record(1, 2, clients + 1);
        applied.record(clients + 1, 1, clients + 2);
        assert_eq!(applied.seen(1, 1), RequestSeen::Applied);
        assert_eq!(applied.seen(2, 1), RequestSeen::New);
        assert_eq!(applied.clients.len(), CLIENTS_MAX);
    }

    #[test]
    fn requests_without_a_client_are_always_new() {
        let mut applied = AppliedRequests::default();
        applied.record(0, 1, 1);
        assert_eq!(applied.seen(0, 1), RequestSeen::New);
    }
}
