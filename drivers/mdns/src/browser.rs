//! Finds the instances of a service.

use std::collections::HashMap;
use std::net::Ipv4Addr;

use wire_mdns::{DecodeError, DnsMessage, DnsName, DnsQuestion, DnsRecord, RecordData, kind};

use crate::{MdnsError, service_kind};

/// Instances, and hosts, that are remembered at most; what is beyond is ignored, because any host of the
/// network may answer.
const ENTRIES_MAX: usize = 64;
/// Interval after the first query; each is twice as long as the one before, up to an hour (RFC 6762, section
/// 5.2).
const FIRST_INTERVAL_MS: u64 = 1000;
const INTERVAL_MAX_MS: u64 = 3_600_000;
/// Reports of an instance at most, each with another address, port or text.
const REPORTS_MAX: usize = 8;
/// Bytes of the attributes of an instance that are remembered; longer ones are ignored (RFC 6763, section
/// 6.2, recommends no more).
const TEXT_BYTES_MAX: usize = 1300;
/// Questions about what is missing of an instance that was heard of, a second apart.
const RESOLUTIONS_MAX: u32 = 3;

/// An instance of a service, with an address of its host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FoundService {
    /// Name of the instance.
    pub instance: String,
    /// An address of its host.
    pub address: Ipv4Addr,
    /// Its port.
    pub port: u16,
    /// Attributes of the form `key=value`.
    pub text: Vec<Vec<u8>>,
}

impl FoundService {
    /// The value of an attribute; its key has any case (RFC 6763, section 6.4).
    pub fn attribute(&self, key: &str) -> Option<&str> {
        let value = |text: &Vec<u8>| {
            let equals = text.iter().position(|byte| *byte == b'=')?;
            text[..equals].eq_ignore_ascii_case(key.as_bytes()).then_some(equals + 1)
        };
        let (text, at) = self.text.iter().find_map(|text| Some((text, value(text)?)))?;
        std::str::from_utf8(&text[at..]).ok()
    }
}

/// Finds the instances of a service: asks for them, ever more rarely, and listens for announcements.
///
/// The caller multicasts what [`poll`](Self::poll) returns at [`deadline`](Self::deadline), and passes
/// received messages to [`receive`](Self::receive). Withdrawn instances stay known.
#[derive(Debug)]
pub struct Browser {
    kind: DnsName,
    instances: HashMap<DnsName, Instance>,
    hosts: HashMap<DnsName, Ipv4Addr>,
    next_ms: u64,
    interval_ms: u64,
    /// When what is missing is asked for.
    resolve_ms: Option<u64>,
}

#[derive(Debug, Default)]
struct Instance {
    service: Option<(DnsName, u16)>,
    text: Option<Vec<Vec<u8>>>,
    reported: Vec<FoundService>,
    resolutions: u32,
}

impl Browser {
    /// Looks for instances of a kind such as `_nvme-disc._tcp`. The first query is due.
    ///
    /// # Errors
    /// The kind is not a name of DNS.
    pub fn new(kind: &str) -> Result<Browser, MdnsError> {
        let kind = service_kind(kind)?;
        // The names of instances are longer.
        kind.child(b"x").map_err(|_: DecodeError| DecodeError::value("length of a name", 0, 255))?;
        Ok(Browser {
            kind,
            instances: HashMap::new(),
            hosts: HashMap::new(),
            next_ms: 0,
            interval_ms: FIRST_INTERVAL_MS,
            resolve_ms: None,
        })
    }

    /// The kind, with its domain.
    pub fn kind(&self) -> &DnsName {
        &self.kind
    }

    /// When [`poll`](Self::poll) has a query, in milliseconds.
    pub fn deadline(&self) -> u64 {
        self.resolve_ms.map_or(self.next_ms, |resolve_ms| resolve_ms.min(self.next_ms))
    }

    /// The query that is due.
    pub fn poll(&mut self, now_ms: u64) -> Option<Vec<u8>> {
        let mut questions = Vec::new();
        if self.next_ms <= now_ms {
            questions.push(DnsQuestion { name: self.kind.clone(), kind: kind::PTR });
            self.next_ms = now_ms + self.interval_ms;
            self.interval_ms = (self.interval_ms * 2).min(INTERVAL_MAX_MS);
        }
        if self.resolve_ms.is_some_and(|resolve_ms| resolve_ms <= now_ms) {
            for (name, instance) in &mut self.instances {
                if instance.resolutions == RESOLUTIONS_MAX {
                    continue;
                }
                let questions_before = questions.len();
                let mut ask = |name: &DnsName, kind| questions.push(DnsQuestion { name: name.clone(), kind });
                match &instance.service {
                    None => ask(name, kind::SRV),
                    Some((host, _)) if !self.hosts.contains_key(host) => ask(host, kind::A),
                    Some(_) => {}
                }
                if instance.text.is_none() {
                    ask(name, kind::TXT);
                }
                instance.resolutions += u32::from(questions.len() > questions_before);
            }
            self.resolve_ms = None;
            self.schedule_resolution(now_ms + FIRST_INTERVAL_MS);
        }
        // A message of at most as many questions as a responder has to accept.
        questions.truncate(wire_mdns::RECORDS_MAX);
        let is_due = !questions.is_empty();
        is_due.then(|| DnsMessage { questions, ..DnsMessage::default() }.encode())
    }

    fn schedule_resolution(&mut self, at_ms: u64) {
        let hosts = &self.hosts;
        let is_missing = |one: &Instance| {
            let has_host = one.service.as_ref().is_some_and(|(host, _)| hosts.contains_key(host));
            one.resolutions < RESOLUTIONS_MAX && !(has_host && one.text.is_some())
        };
        if self.resolve_ms.is_none() && self.instances.values().any(is_missing) {
            self.resolve_ms = Some(at_ms);
        }
    }

    /// Handles a received message; returns the instances that it completes or changes.
    pub fn receive(&mut self, message: &[u8], now_ms: u64) -> Vec<FoundService> {
        let Ok(response) = DnsMessage::decode(message) else { return Vec::new() };
        if !response.is_response {
            return Vec::new();
        }
        // Pointers first: records of instances and hosts that nothing points to are not remembered.
        let all = || response.answers.iter().chain(&response.additional).filter(|one| one.ttl_s > 0);
        all().for_each(|one| self.add_pointer(one));
        all().for_each(|one| self.add_attribute(one));
        all().for_each(|one| self.add_address(one));
        let mut found = Vec::new();
        for (name, instance) in &mut self.instances {
            let (Some((host, port)), Some(text)) = (&instance.service, &instance.text) else { continue };
            let Some(address) = self.hosts.get(host) else { continue };
            let is_service =
                |one: &FoundService| one.address == *address && one.port == *port && one.text == *text;
            // A host announces each of its addresses on the network of it, again and again.
            if instance.reported.len() == REPORTS_MAX || instance.reported.iter().any(is_service) {
                continue;
            }
            let label = name.labels().next().unwrap_or_default();
            let service = FoundService {
                instance: String::from_utf8_lossy(label).into_owned(),
                address: *address,
                port: *port,
                text: text.clone(),
            };
            instance.reported.push(service.clone());
            found.push(service);
        }
        found.sort_by(|one, other| one.instance.cmp(&other.instance));
        self.schedule_resolution(now_ms + FIRST_INTERVAL_MS);
        found
    }

    fn add_pointer(&mut self, record: &DnsRecord) {
        if let RecordData::Pointer(instance) = &record.data
            && record.name == self.kind
            && instance.is_child_of(&self.kind)
            && self.instances.len() < ENTRIES_MAX
        {
            self.instances.entry(instance.clone()).or_default();
        }
    }

    fn add_attribute(&mut self, record: &DnsRecord) {
        let Some(instance) = self.instances.get_mut(&record.name) else { return };
        match &record.data {
            RecordData::Service { host, port } if *port != 0 => {
                instance.service = Some((host.clone(), *port))
            }
            RecordData::Text(text)
                if text.iter().map(|one| 1 + one.len()).sum::<usize>() <= TEXT_BYTES_MAX =>
            {
                instance.text = Some(text.clone())
            }
            _ => {}
        }
    }

    fn add_address(&mut self, record: &DnsRecord) {
        let RecordData::Ipv4(address) = record.data else { return };
        let mut services = self.instances.values().filter_map(|one| one.service.as_ref());
        if services.any(|(host, _)| *host == record.name)
            && (self.hosts.len() < ENTRIES_MAX || self.hosts.contains_key(&record.name))
        {
            self.hosts.insert(record.name.clone(), address);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KIND: &str = "_nvme-disc._tcp";

    fn record(name: &str, data: RecordData) -> DnsRecord {
        DnsRecord { name: name.parse().unwrap(), ttl_s: 120, flush: false, data }
    }

    fn response(answers: Vec<DnsRecord>) -> Vec<u8> {
        DnsMessage { is_response: true, answers, ..DnsMessage::default() }.encode()
    }

    fn pointer(instance: &str) -> DnsRecord {
        record("_nvme-disc._tcp.local", RecordData::Pointer(instance.parse().unwrap()))
    }

    fn questions(query: &[u8]) -> Vec<(String, u16)> {
        let query = DnsMessage::decode(query).unwrap();
        let mut all: Vec<(String, u16)> =
            query.questions.iter().map(|one| (one.name.to_string(), one.kind)).collect();
        all.sort();
        all
    }

    #[test]
    fn queries_become_rarer() {
        let mut browser = Browser::new(KIND).unwrap();
        let mut times = Vec::new();
        while times.len() < 15 {
            let now_ms = browser.deadline();
            times.push(now_ms);
            let query = browser.poll(now_ms).unwrap();
            assert_eq!(questions(&query), [("_nvme-disc._tcp.local".to_string(), kind::PTR)]);
            assert_eq!(browser.poll(now_ms), None);
        }
        assert_eq!(times[..5], [0, 1000, 3000, 7000, 15_000]);
        assert_eq!(times[14] - times[13], INTERVAL_MAX_MS);
    }

    #[test]
    fn an_instance_is_resolved_in_steps_and_reported_once_for_each_address() {
        let mut browser = Browser::new("_nvme-disc._tcp.Local.").unwrap();
        browser.poll(0);
        let instance = "one._nvme-disc._tcp.local";
        assert!(browser.receive(&response(vec![pointer(instance)]), 500).is_empty());
        let query = browser.poll(1500).unwrap();
        let ask = |name: &str, kind| (name.to_string(), kind);
        let expected =
            [ask("_nvme-disc._tcp.local", kind::PTR), ask(instance, kind::TXT), ask(instance, kind::SRV)];
        assert_eq!(questions(&query), expected);
        let host = || RecordData::Service { host: "h1.local".parse().unwrap(), port: 8009 };
        let text = || {
            RecordData::Text(vec![b"NQN=nqn.2014-08.org.nvmexpress.discovery".to_vec(), b"p=tcp".to_vec()])
        };
        let records = vec![record(instance, host()), record(instance, text())];
        assert!(browser.receive(&response(records), 1600).is_empty());
        assert_eq!(questions(&browser.poll(2600).unwrap()), [ask("h1.local", kind::A)]);
        // The address of a host that was not asked about is ignored.
        let address = |host: &str, last| record(host, RecordData::Ipv4([192, 0, 2, last].into()));
        assert!(browser.receive(&response(vec![address("h2.local", 2)]), 2700).is_empty());
        let found = browser.receive(&response(vec![address("H1.local", 1)]), 2700);
        assert_eq!(found.len(), 1);
        assert_eq!(
            (found[0].instance.as_str(), found[0].address, found[0].port),
            ("one", [192, 0, 2, 1].into(), 8009)
        );
        assert_eq!(found[0].attribute("nqn"), Some("nqn.2014-08.org.nvmexpress.discovery"));
        assert_eq!((found[0].attribute("P"), found[0].attribute("x")), (Some("tcp"), None));
        assert!(browser.receive(&response(vec![address("h1.local", 1)]), 2800).is_empty());
        assert_eq!(browser.receive(&response(vec![address("h1.local", 9)]), 2900).len(), 1);
        assert!(browser.receive(&response(vec![address("h1.local", 1)]), 2900).is_empty());
        let more =
            (10..100).map(|last| browser.receive(&response(vec![address("h1.local", last)]), 2950).len());
        assert_eq!(more.sum::<usize>(), REPORTS_MAX - 2);
        // Withdrawn records change nothing.
        let gone = DnsRecord { ttl_s: 0, ..address("h1.local", 7) };
        assert!(browser.receive(&response(vec![gone]), 3000).is_empty());
    }

    #[test]
    fn what_is_never_resolved_is_asked_for_three_times() {
        let mut browser = Browser::new(KIND).unwrap();
        browser.receive(&response(vec![pointer("one._nvme-disc._tcp.local")]), 0);
        let mut asked = 0;
        for _ in 0..20 {
            let now_ms = browser.deadline();
            let query = browser.poll(now_ms).unwrap();
            asked += questions(&query).iter().filter(|(_, of)| *of == kind::SRV).count();
        }
        assert_eq!(asked, 3);
    }

    #[test]
    fn floods_of_names_are_bounded() {
        let mut browser = Browser::new(KIND).unwrap();
        for number in 0..1000 {
            let (instance, host) = (format!("i{number}._nvme-disc._tcp.local"), format!("h{number}.local"));
            let service = RecordData::Service { host: host.parse().unwrap(), port: 1 };
            browser.receive(
                &response(vec![
                    pointer(&instance),
                    pointer("elsewhere.local"),
                    record(&instance, service),
                    record(&host, RecordData::Ipv4([192, 0, 2, 1].into())),
                ]),
                number,
            );
        }
        assert_eq!((browser.instances.len(), browser.hosts.len()), (ENTRIES_MAX, ENTRIES_MAX));
        for (attributes, is_kept) in [(6, false), (5, true)] {
            let text = RecordData::Text(vec![vec![b'x'; 255]; attributes]);
            let found = browser.receive(&response(vec![record("i0._nvme-disc._tcp.local", text)]), 2000);
            assert_eq!(found.len(), usize::from(is_kept), "{attributes} attributes of 255 bytes");
        }
        let query = browser.poll(5000).unwrap();
        assert!(DnsMessage::decode(&query).unwrap().questions.len() <= wire_mdns::RECORDS_MAX);
        // Queries and what is no message are ignored.
        assert!(browser.receive(&query, 5000).is_empty());
        assert!(browser.receive(&[0xff; 64], 5000).is_empty());
    }
}
