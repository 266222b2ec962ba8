//! Which requests of clients are applied, so that a retry applies once.

use std::collections::BTreeMap;

/// Newest numbers of a client that are told apart. A client has fewer requests in flight.
pub const CLIENT_WINDOW: u64 = 1024;
/// Most clients that are remembered; the one that wrote least recently is forgotten first.
pub const CLIENTS_MAX: usize = 1024;

const WORDS: usize = CLIENT_WINDOW as usize / 64;

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
    pub(crate) fn record(&mut self, client: u64, number: u64, sequence: u64) {
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
