//! A client that begins TLS, on networks that cut and stall.

use tls::{HandshakeProgress, PlainRead, TlsSession};
use wire_nbd::*;

use super::*;

/// A client that knows only bytes, and after [`start_tls`](Self::start_tls) sends and receives records.
pub(super) struct SecureClient {
    id: ConnectionId,
    received: Vec<u8>,
    session: Option<TlsSession>,
}

impl SecureClient {
    /// After the greeting.
    pub(super) fn connect(target: &mut SimulatedTarget) -> SecureClient {
        let id = target.connect();
        let mut client = SecureClient { id, received: Vec::new(), session: None };
        assert!(client.read(target, NbdGreeting::SIZE).is_some());
        client.send(target, &[0, 0, 0, 3]);
        client
    }

    pub(super) fn start_tls(&mut self, target: &mut SimulatedTarget, key: Psk) -> Option<()> {
        assert_eq!(self.option(target, OptionCode::StartTls, b"")?.0, OptionReplyKind::Ack);
        let mut session = TlsSession::client(key).unwrap();
        while session.handshake().ok()? == HandshakeProgress::Pending {
            self.send_records(target, &mut session);
            let records = self.read_some(target)?;
            session.put_records(&records).ok()?;
        }
        self.send_records(target, &mut session);
        self.session = Some(session);
        Some(())
    }

    fn send_records(&mut self, target: &mut SimulatedTarget, session: &mut TlsSession) {
        let mut records = vec![0; session.records_len()];
        let count = session.take_records(&mut records);
        self.send_raw(target, &records[..count]);
    }

    pub(super) fn send(&mut self, target: &mut SimulatedTarget, bytes: &[u8]) {
        match self.session.take() {
            None => self.send_raw(target, bytes),
            Some(mut session) => {
                session.write(bytes).unwrap();
                self.send_records(target, &mut session);
                self.session = Some(session);
            }
        }
    }

    fn send_raw(&mut self, target: &mut SimulatedTarget, mut bytes: &[u8]) {
        for _ in 0..100_000 {
            if let TransferResult::Bytes(count) = target.send(self.id, bytes) {
                bytes = &bytes[count..];
            }
            target.poll();
            if bytes.is_empty() {
                return;
            }
        }
        panic!("{} bytes cannot be sent", bytes.len());
    }

    /// Bytes as they come; `None` if the connection is closed.
    fn read_some(&mut self, target: &mut SimulatedTarget) -> Option<Vec<u8>> {
        for _ in 0..100_000 {
            target.poll();
            let mut bytes = Vec::new();
            if target.receive(self.id, &mut bytes)? > 0 {
                return Some(bytes);
            }
        }
        panic!("nothing arrives");
    }

    pub(super) fn read(&mut self, target: &mut SimulatedTarget, count: usize) -> Option<Vec<u8>> {
        while self.received.len() < count {
            let mut bytes = self.read_some(target)?;
            if let Some(session) = &mut self.session {
                session.put_records(&bytes).unwrap();
                bytes.clear();
                let mut plain = [0; 4096];
                while let PlainRead::Bytes(count) = session.read(&mut plain).unwrap() {
                    bytes.extend(&plain[..count]);
                }
            }
            self.received.extend(bytes);
        }
        Some(self.received.drain(..count).collect())
    }

    /// What has been received beyond what was read.
    pub(super) fn take_received(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.received)
    }

    /// The last answer to an option: those before it are informative.
    fn option(
        &mut self,
        target: &mut SimulatedTarget,
        option: OptionCode,
        data: &[u8],
    ) -> Option<(OptionReplyKind, Vec<Vec<u8>>)> {
        let mut bytes = OptionHeader { option: option as u32, length: data.len() as u32 }.to_bytes().to_vec();
        bytes.extend(data);
        self.send(target, &bytes);
        let mut before = Vec::new();
        loop {
            let header = self.read(target, OptionReplyHeader::SIZE)?;
            let header = OptionReplyHeader::decode(header.first_chunk().unwrap()).unwrap();
            let data = self.read(target, header.length as usize)?;
            if !matches!(header.kind, OptionReplyKind::Info | OptionReplyKind::Server) {
                return Some((header.kind, before));
            }
            before.push(data);
        }
    }

    /// Selects an export.
    pub(super) fn go(&mut self, target: &mut SimulatedTarget, name: &str) -> Option<OptionReplyKind> {
        let mut data = (name.len() as u32).to_be_bytes().to_vec();
        data.extend(name.as_bytes());
        data.extend([0, 0]);
        Some(self.option(target, OptionCode::Go, &data)?.0)
    }

    fn request(
        &mut self,
        target: &mut SimulatedTarget,
        command: NbdCommand,
        data: &[u8],
        length: usize,
    ) -> SimpleReply {
        let (flags, cookie, offset) = (CommandFlags::empty(), 7, 1000);
        let header = RequestHeader { flags, command: command.into(), cookie, offset, length: length as u64 };
        let mut bytes = vec![0; 28];
        header.encode(HeaderForm::Compact, &mut bytes);
        bytes.extend(data);
        self.send(target, &bytes);
        SimpleReply::decode(self.read(target, 16).unwrap().first_chunk().unwrap()).unwrap()
    }
}

#[test]
fn an_export_for_tls_is_written_and_read_over_any_network() {
    for seed in 0..6 {
        let faults = NetworkFaults { cut_per_mille: 400, stall_per_mille: 300, ..NetworkFaults::default() };
        let mut target = SimulatedTarget::new(seed, faults);
        let mut client = SecureClient::connect(&mut target);
        client.start_tls(&mut target, client_key()).unwrap();
        assert_eq!(client.go(&mut target, "private"), Some(OptionReplyKind::Ack));
        let data: Vec<u8> = (0..200_000u32).map(|number| (number / 3) as u8).collect();
        let done = SimpleReply { error: 0, cookie: 7 };
        assert_eq!(client.request(&mut target, NbdCommand::Write, &data, data.len()), done, "seed {seed}");
        assert_eq!(client.request(&mut target, NbdCommand::Read, &[], data.len()), done);
        assert!(client.read(&mut target, data.len()).unwrap() == data, "seed {seed}");
    }
}

#[test]
fn without_tls_its_exports_are_neither_seen_nor_opened() {
    let mut target = SimulatedTarget::new(1, NetworkFaults::default());
    let mut client = SecureClient::connect(&mut target);
    let (kind, names) = client.option(&mut target, OptionCode::List, b"").unwrap();
    assert_eq!((kind, names.len()), (OptionReplyKind::Ack, 2));
    assert_eq!(client.go(&mut target, "private"), Some(OptionReplyKind::ErrTlsReqd));
    client.start_tls(&mut target, client_key()).unwrap();
    let (kind, names) = client.option(&mut target, OptionCode::List, b"").unwrap();
    assert_eq!((kind, names.len()), (OptionReplyKind::Ack, 3));
    let again = client.option(&mut target, OptionCode::StartTls, b"");
    assert_eq!(again.unwrap().0, OptionReplyKind::ErrInvalid);
    assert_eq!(client.go(&mut target, "disk"), Some(OptionReplyKind::Ack), "TLS is for every export");

    let mut client = SecureClient::connect(&mut target);
    let mut by_name = OptionHeader { option: OptionCode::ExportName as u32, length: 7 }.to_bytes().to_vec();
    by_name.extend(b"private");
    client.send(&mut target, &by_name);
    assert_eq!(client.read(&mut target, 1), None, "EXPORT_NAME has no reply for an error");
}

#[test]
fn what_was_negotiated_before_tls_is_forgotten() {
    let mut target = SimulatedTarget::new(1, NetworkFaults::default());
    let mut client = SecureClient::connect(&mut target);
    client.option(&mut target, OptionCode::StructuredReply, b"").unwrap();
    client.start_tls(&mut target, client_key()).unwrap();
    client.go(&mut target, "disk").unwrap();
    // A simple reply, where a structured one would have another magic number.
    assert_eq!(client.request(&mut target, NbdCommand::Read, &[], 512), SimpleReply { error: 0, cookie: 7 });
}

#[test]
fn a_wrong_key_and_bytes_before_tls_end_the_connection() {
    let mut target = SimulatedTarget::new(1, NetworkFaults::default());
    let wrong = Psk::new("alice", Secret::new([8; 32]), PskHash::Sha256).unwrap();
    let unknown = Psk::new("bob", Secret::new([7; 32]), PskHash::Sha256).unwrap();
    for key in [wrong, unknown] {
        let mut client = SecureClient::connect(&mut target);
        assert_eq!(client.start_tls(&mut target, key), None);
    }
    let mut client = SecureClient::connect(&mut target);
    let option = |option| OptionHeader { option: option as u32, length: 0 }.to_bytes();
    client.send(&mut target, &[option(OptionCode::StartTls), option(OptionCode::List)].concat());
    while client.read(&mut target, 1).is_some() {}
    assert!(target.group.connections().is_empty());
}
