//! Announces services and answers questions about them.

use std::net::Ipv4Addr;

use random::WyRand;
use wire_mdns::{DnsMessage, DnsName, DnsQuestion, DnsRecord, RecordData, kind};

use crate::{MdnsError, service_kind};

/// Time to live in seconds of records with a host's name or address, and of others (RFC 6762, section 10).
const HOST_TTL_S: u32 = 120;
const OTHER_TTL_S: u32 = 4500;
/// A record is multicast once in this time at most (RFC 6762, section 6).
const MULTICAST_INTERVAL_MS: u64 = 1000;
/// Announcements after the start, a second apart (RFC 6762, section 8.3).
const ANNOUNCEMENTS: u32 = 2;
/// An answer waits 20 to 120 ms, so that those of others do not collide with it (RFC 6762, section 6).
const ANSWER_DELAY_MS: (u64, u64) = (20, 100);

/// A service to publish.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MdnsService {
    kind: DnsName,
    instance: DnsName,
    host: DnsName,
    /// The host's address. The service is published on its network.
    pub(crate) address: Ipv4Addr,
    port: u16,
    text: Vec<Vec<u8>>,
}

impl MdnsService {
    /// A service of a kind such as `_nvme-disc._tcp`. Instance and host are labels; the caller sees to it
    /// that no other program of the network has them, because names are not probed for. `text` are attributes
    /// of the form `key=value`, of 255 bytes at most.
    ///
    /// # Errors
    /// A name is not valid.
    pub fn new(
        kind: &str,
        instance: &str,
        host: &str,
        address: Ipv4Addr,
        port: u16,
        text: &[&str],
    ) -> Result<MdnsService, MdnsError> {
        let kind = service_kind(kind)?;
        let local: DnsName = "local".parse()?;
        let instance = kind.child(instance.as_bytes())?;
        let host = local.child(host.as_bytes())?;
        let text = text.iter().map(|text| text.as_bytes()[..text.len().min(255)].to_vec()).collect();
        Ok(MdnsService { kind, instance, host, address, port, text })
    }

    /// The response with all records, which `ttl` gives their times to live.
    fn response(&self, ttl: impl Fn(u32) -> u32, with_kind: bool) -> DnsMessage {
        let record =
            |name: &DnsName, ttl_s, flush, data| DnsRecord { name: name.clone(), ttl_s, flush, data };
        let service = RecordData::Service { host: self.host.clone(), port: self.port };
        let mut answers = vec![
            record(&self.kind, ttl(OTHER_TTL_S), false, RecordData::Pointer(self.instance.clone())),
            record(&self.instance, ttl(HOST_TTL_S), true, service),
            record(&self.instance, ttl(OTHER_TTL_S), true, RecordData::Text(self.text.clone())),
            record(&self.host, ttl(HOST_TTL_S), true, RecordData::Ipv4(self.address)),
        ];
        if with_kind {
            let pointer = RecordData::Pointer(self.kind.clone());
            answers.push(record(&service_types(), ttl(OTHER_TTL_S), false, pointer));
        }
        DnsMessage { is_response: true, answers, ..DnsMessage::default() }
    }

    /// Whether a question of a query that knows these records has to be answered.
    fn answers(&self, question: &DnsQuestion, known: &[DnsRecord]) -> bool {
        let is_one_of = |kinds: &[u16]| question.kind == kind::ANY || kinds.contains(&question.kind);
        if question.name == self.kind && is_one_of(&[kind::PTR]) {
            // Known-answer suppression (RFC 6762, section 7.1).
            let pointer = RecordData::Pointer(self.instance.clone());
            let is_known = |one: &DnsRecord| {
                one.name == self.kind && one.data == pointer && one.ttl_s >= OTHER_TTL_S / 2
            };
            return !known.iter().any(is_known);
        }
        question.name == self.instance && is_one_of(&[kind::SRV, kind::TXT])
            || question.name == self.host && is_one_of(&[kind::A])
    }
}

/// The name under which all types of services are listed (RFC 6763, section 9).
fn service_types() -> DnsName {
    "_services._dns-sd._udp.local".parse().expect("a valid name")
}

/// Announces services and answers questions about them.
///
/// The caller passes received messages to [`receive`](Self::receive), calls [`poll`](Self::poll) at
/// [`deadline`](Self::deadline), and multicasts what it returns; at the end [`goodbye`](Self::goodbye).
#[derive(Debug)]
pub struct Responder {
    published: Vec<Published>,
    random: WyRand,
}

#[derive(Debug)]
struct Published {
    service: MdnsService,
    announcements_left: u32,
    due_ms: Option<u64>,
    sent_ms: Option<u64>,
    with_kind: bool,
}

impl Responder {
    /// A responder whose announcements are due. The seed sets the delays of answers.
    pub fn new(services: Vec<MdnsService>, seed: u64) -> Responder {
        let published = services.into_iter().map(|service| Published {
            service,
            announcements_left: ANNOUNCEMENTS,
            due_ms: Some(0),
            sent_ms: None,
            with_kind: true,
        });
        Responder { published: published.collect(), random: WyRand::new(seed) }
    }

    /// When [`poll`](Self::poll) has messages, in milliseconds; `None` until a question.
    pub fn deadline(&self) -> Option<u64> {
        self.published.iter().filter_map(|one| one.due_ms).min()
    }

    /// Handles a received message. What is not a question about the services is ignored.
    pub fn receive(&mut self, message: &[u8], now_ms: u64) {
        let Ok(query) = DnsMessage::decode(message) else { return };
        if query.is_response {
            return;
        }
        let asks_types = query
            .questions
            .iter()
            .any(|one| matches!(one.kind, kind::PTR | kind::ANY) && one.name == service_types());
        for one in &mut self.published {
            let asked = query.questions.iter().any(|question| one.service.answers(question, &query.answers));
            if !asked && !asks_types {
                continue;
            }
            one.with_kind |= asks_types;
            let delayed = now_ms + ANSWER_DELAY_MS.0 + self.random.below(ANSWER_DELAY_MS.1);
            let earliest = one.sent_ms.map_or(0, |sent_ms| sent_ms + MULTICAST_INTERVAL_MS);
            one.due_ms.get_or_insert(delayed.max(earliest));
        }
    }

    /// The messages that are due, with the address of the host from which each is multicast.
    pub fn poll(&mut self, now_ms: u64) -> Vec<(Ipv4Addr, Vec<u8>)> {
        let due = self.published.iter_mut().filter(|one| one.due_ms.is_some_and(|due_ms| due_ms <= now_ms));
        due.map(|one| {
            one.announcements_left = one.announcements_left.saturating_sub(1);
            one.due_ms = (one.announcements_left > 0).then_some(now_ms + MULTICAST_INTERVAL_MS);
            one.sent_ms = Some(now_ms);
            let response = one.service.response(|ttl_s| ttl_s, std::mem::take(&mut one.with_kind));
            (one.service.address, response.encode())
        })
        .collect()
    }

    /// Messages that withdraw the services.
    pub fn goodbye(&self) -> Vec<(Ipv4Addr, Vec<u8>)> {
        let services = self.published.iter().map(|one| &one.service);
        services.map(|service| (service.address, service.response(|_| 0, false).encode())).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn responder() -> Responder {
        let service = |instance: &str, host: &str, last| {
            let address = [192, 0, 2, last].into();
            MdnsService::new("_nvme-disc._tcp", instance, host, address, 8009, &["p=tcp"]).unwrap()
        };
        Responder::new(vec![service("one", "h1", 1), service("two", "h2", 2)], 1)
    }

    fn query(name: &str, kind: u16, answers: Vec<DnsRecord>) -> Vec<u8> {
        let questions = vec![DnsQuestion { name: name.parse().unwrap(), kind }];
        DnsMessage { questions, answers, ..DnsMessage::default() }.encode()
    }

    /// Of which services the messages at a time are.
    fn sent(responder: &mut Responder, now_ms: u64) -> Vec<u8> {
        responder.poll(now_ms).into_iter().map(|(address, _)| address.octets()[3]).collect()
    }

    #[test]
    fn services_are_announced_twice_and_withdrawn() {
        let mut responder = responder();
        assert_eq!(sent(&mut responder, 5), [1, 2]);
        assert_eq!(responder.deadline(), Some(1005));
        assert!(sent(&mut responder, 1004).is_empty());
        let (_, last) = responder.poll(1005).remove(0);
        let last = DnsMessage::decode(&last).unwrap();
        assert!(last.is_response && last.answers.len() == 4);
        let flushed: Vec<(u16, u32, bool)> =
            last.answers.iter().map(|one| (one.data.kind(), one.ttl_s, one.flush)).collect();
        let expected =
            [(kind::PTR, 4500, false), (kind::SRV, 120, true), (kind::TXT, 4500, true), (kind::A, 120, true)];
        assert_eq!(flushed, expected);
        assert_eq!(responder.deadline(), None);
        for (_, message) in responder.goodbye() {
            assert!(DnsMessage::decode(&message).unwrap().answers.iter().all(|one| one.ttl_s == 0));
        }
    }

    #[test]
    fn questions_about_a_service_are_answered_once_a_second_at_most() {
        let mut responder = responder();
        responder.poll(0);
        responder.poll(1000);
        for (name, kind, expected) in [
            ("_nvme-disc._tcp.local", kind::PTR, &[1, 2][..]),
            ("_NVMe-Disc._tcp.local", kind::ANY, &[1, 2]),
            ("_nvme-disc._tcp.local", kind::A, &[]),
            ("_nvme-disc._udp.local", kind::PTR, &[]),
            ("one._nvme-disc._tcp.local", kind::SRV, &[1]),
            ("two._nvme-disc._tcp.local", kind::TXT, &[2]),
            ("h2.local", kind::A, &[2]),
            ("h2.local", kind::AAAA, &[]),
            ("_services._dns-sd._udp.local", kind::PTR, &[1, 2]),
        ] {
            let start =
                10_000 + responder.published[0].sent_ms.unwrap().max(responder.published[1].sent_ms.unwrap());
            for at in 0..500 {
                responder.receive(&query(name, kind, Vec::new()), start + at);
            }
            assert!(sent(&mut responder, start + 19).is_empty(), "{name} {kind}");
            assert_eq!(sent(&mut responder, start + 120), expected, "{name} {kind}");
            responder.receive(&query(name, kind, Vec::new()), start + 121);
            let (early, late) = (sent(&mut responder, start + 1119), sent(&mut responder, start + 1240));
            assert_eq!((&early[..], &late[..]), (&[][..], expected), "{name} {kind}");
        }
    }

    #[test]
    fn known_answers_and_responses_of_others_are_not_answered() {
        let mut responder = responder();
        responder.poll(0);
        responder.poll(1000);
        let known = |ttl_s| DnsRecord {
            name: "_nvme-disc._tcp.local".parse().unwrap(),
            ttl_s,
            flush: false,
            data: RecordData::Pointer("one._nvme-disc._tcp.local".parse().unwrap()),
        };
        responder.receive(&query("_nvme-disc._tcp.local", kind::PTR, vec![known(2250)]), 5000);
        assert_eq!(sent(&mut responder, 6000), [2]);
        responder.receive(&query("_nvme-disc._tcp.local", kind::PTR, vec![known(2249)]), 10_000);
        assert_eq!(sent(&mut responder, 11_000), [1, 2]);
        let (_, own) = responder.goodbye().remove(0);
        responder.receive(&own, 20_000);
        responder.receive(&[0xff; 100], 20_000);
        assert_eq!(responder.deadline(), None);
    }
}
