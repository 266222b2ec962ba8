mod connections;
mod functions;
mod logins;
mod memory;
mod moves;
mod transfers;

use random::WyRand;
use wire_iscsi::*;
use wire_scsi::ScsiStatus;

use super::*;

/// An initiator that knows only bytes.
struct Initiator {
    id: ConnectionId,
    received: Vec<u8>,
    cmd_sn: u32,
    header_digest: bool,
    data_digest: bool,
}

/// A PDU of the target.
struct Received {
    header: [u8; HEADER_BYTES],
    data: Vec<u8>,
}

impl Received {
    fn opcode(&self) -> Opcode {
        BasicHeader::decode(&self.header).unwrap().opcode
    }

    fn response(&self) -> ScsiResponse {
        ScsiResponse::decode(&self.header).unwrap()
    }

    /// Additional sense code and qualifier.
    fn sense(&self) -> (u8, u8) {
        assert_eq!(self.response().status, ScsiStatus::CheckCondition as u8);
        (self.data[2 + 12], self.data[2 + 13])
    }
}

const WRITE: u8 = 0x2a;
const READ: u8 = 0x28;

impl Initiator {
    fn connect(target: &mut SimulatedTarget) -> Initiator {
        let id = target.connect();
        Initiator { id, received: Vec::new(), cmd_sn: 1, header_digest: false, data_digest: false }
    }

    /// Logs in to the node, and takes the unit attention of the new nexus.
    fn begin(target: &mut SimulatedTarget, keys: &[(&str, &str)]) -> Initiator {
        let mut initiator = Initiator::connect(target);
        let all = [&[("InitiatorName", INITIATOR), ("TargetName", NODE)], keys].concat();
        initiator.send(target, &login(&all));
        let response = LoginResponse::decode(&initiator.read(target).header).unwrap();
        assert_eq!((response.status, response.transit, response.next_stage), (0, true, 3));
        assert_ne!(response.tsih, 0);
        initiator.header_digest = keys.contains(&("HeaderDigest", "CRC32C"));
        initiator.data_digest = keys.contains(&("DataDigest", "CRC32C"));
        initiator.command(target, [0; 16], 0, (false, false), &[], true);
        assert_eq!(initiator.read(target).sense(), (0x29, 0));
        initiator
    }

    fn send(&mut self, target: &mut SimulatedTarget, mut bytes: &[u8]) {
        for _ in 0..1_000_000 {
            if let TransferResult::Bytes(count) = target.send(self.id, bytes) {
                bytes = &bytes[count..];
            }
            if bytes.is_empty() {
                return;
            }
            target.poll();
            target.receive(self.id, &mut self.received);
        }
        panic!("{} bytes cannot be sent", bytes.len());
    }

    /// Sends a PDU with the digests that were negotiated.
    fn send_pdu(&mut self, target: &mut SimulatedTarget, header: &[u8; HEADER_BYTES], data: &[u8]) {
        let plain = pdu(header, data);
        let (header, data) = plain.split_at(HEADER_BYTES);
        let mut bytes = header.to_vec();
        if self.header_digest {
            bytes.extend(digest(&[header]));
        }
        bytes.extend(data);
        if self.data_digest && !data.is_empty() {
            bytes.extend(digest(&[data]));
        }
        self.send(target, &bytes);
    }

    fn take(&mut self, target: &mut SimulatedTarget, count: usize) -> Option<Vec<u8>> {
        for _ in 0..1_000_000 {
            if self.received.len() >= count {
                return Some(self.received.drain(..count).collect());
            }
            target.poll();
            target.receive(self.id, &mut self.received)?;
        }
        panic!("{} of {count} bytes arrived", self.received.len());
    }

    /// The next PDU; `None` if the target closes the connection.
    fn try_read(&mut self, target: &mut SimulatedTarget) -> Option<Received> {
        let header: [u8; HEADER_BYTES] = self.take(target, HEADER_BYTES)?.try_into().unwrap();
        if self.header_digest {
            assert_eq!(self.take(target, DIGEST_BYTES)?, digest(&[&header]));
        }
        let length = BasicHeader::lengths(&header).1 as usize;
        let mut data = self.take(target, padded(length))?;
        if self.data_digest && length > 0 {
            assert_eq!(self.take(target, DIGEST_BYTES)?, digest(&[&data]));
        }
        data.truncate(length);
        Some(Received { header, data })
    }

    fn read(&mut self, target: &mut SimulatedTarget) -> Received {
        self.try_read(target).expect("the connection is open")
    }

    /// Sends a command with the task tag `cmd_sn + 100`; `direction` is (read, write).
    fn command(
        &mut self,
        target: &mut SimulatedTarget,
        cdb: [u8; 16],
        expected_length: u32,
        (read, write): (bool, bool),
        data: &[u8],
        is_final: bool,
    ) -> u32 {
        let command = ScsiCommand {
            initiator_task_tag: self.cmd_sn.wrapping_add(100),
            is_final,
            read,
            write,
            expected_length,
            cmd_sn: self.cmd_sn,
            cdb,
            ..ScsiCommand::default()
        };
        self.cmd_sn = self.cmd_sn.wrapping_add(1);
        self.send_pdu(target, &command.to_bytes(), data);
        command.initiator_task_tag
    }

    fn data_out(&mut self, target: &mut SimulatedTarget, pdu: DataOut, data: &[u8]) {
        self.send_pdu(target, &pdu.to_bytes(), data);
    }

    /// Answers an R2T with PDUs of at most `segment` bytes.
    fn answer(&mut self, target: &mut SimulatedTarget, r2t: &R2t, data: &[u8], segment: usize) {
        let (first, length) = (r2t.buffer_offset as usize, r2t.desired_length as usize);
        let mut offset = 0;
        for (data_sn, part) in data[first..first + length].chunks(segment).enumerate() {
            let pdu = DataOut {
                initiator_task_tag: r2t.initiator_task_tag,
                target_transfer_tag: r2t.target_transfer_tag,
                is_final: offset + part.len() == length,
                data_sn: data_sn as u32,
                buffer_offset: (first + offset) as u32,
                ..DataOut::default()
            };
            self.data_out(target, pdu, part);
            offset += part.len();
        }
    }

    /// Writes blocks in the way that the parameters allow: the first `immediate` bytes come with the command,
    /// then `unsolicited` bytes, then what R2Ts ask for.
    fn write(
        &mut self,
        target: &mut SimulatedTarget,
        lba: u32,
        data: &[u8],
        immediate: usize,
        unsolicited: usize,
        segment: usize,
    ) {
        let cdb = transfer(WRITE, lba, (data.len() / BLOCK_BYTES) as u16);
        let length = data.len() as u32;
        let tag = self.command(target, cdb, length, (false, true), &data[..immediate], unsolicited == 0);
        let mut offset = immediate;
        let end = immediate + unsolicited;
        for (data_sn, part) in data[immediate..end].chunks(segment).enumerate() {
            let pdu = DataOut {
                initiator_task_tag: tag,
                target_transfer_tag: RESERVED_TAG,
                is_final: offset + part.len() == end,
                data_sn: data_sn as u32,
                buffer_offset: offset as u32,
                ..DataOut::default()
            };
            self.data_out(target, pdu, part);
            offset += part.len();
        }
        loop {
            let received = self.read(target);
            if received.opcode() == Opcode::R2t {
                self.answer(target, &R2t::decode(&received.header).unwrap(), data, segment);
                continue;
            }
            let response = received.response();
            assert_eq!((response.initiator_task_tag, response.status, response.residual), (tag, 0, 0));
            return;
        }
    }

    fn read_blocks(&mut self, target: &mut SimulatedTarget, lba: u32, blocks: u16, expected: u32) -> Vec<u8> {
        let tag = self.command(target, transfer(READ, lba, blocks), expected, (true, false), &[], true);
        let mut data = Vec::new();
        for number in 0.. {
            let received = self.read(target);
            let pdu = DataIn::decode(&received.header).unwrap();
            assert_eq!((pdu.initiator_task_tag, pdu.data_sn), (tag, number));
            assert_eq!(pdu.buffer_offset as usize, data.len());
            data.extend(&received.data);
            if pdu.has_status {
                assert_eq!((pdu.status, pdu.is_final), (0, true));
                break;
            }
        }
        data
    }

    /// Polls until the target closes the connection, and returns the seconds that it took.
    fn seconds_until_closed(&mut self, target: &mut SimulatedTarget, seconds_max: u64) -> Option<u64> {
        for second in 0..seconds_max {
            target.now_ns += 1_000_000_000;
            for _ in 0..10 {
                target.poll();
                if target.receive(self.id, &mut self.received).is_none() {
                    return Some(second);
                }
            }
        }
        None
    }
}

fn transfer(opcode: u8, lba: u32, blocks: u16) -> [u8; 16] {
    let mut cdb = [0; 16];
    cdb[0] = opcode;
    cdb[2..6].copy_from_slice(&lba.to_be_bytes());
    cdb[7..9].copy_from_slice(&blocks.to_be_bytes());
    cdb
}

fn plain_target() -> SimulatedTarget {
    SimulatedTarget::new(1, NetworkFaults::default())
}

#[test]
fn silent_initiators_are_pinged_and_those_that_owe_data_are_disconnected() {
    let mut target = plain_target();
    // No login.
    let mut initiator = Initiator::connect(&mut target);
    let seconds = initiator.seconds_until_closed(&mut target, 30).unwrap();
    assert!((14..=16).contains(&seconds), "{seconds}");
    // No answer to a ping: 30 s until it, 60 s after it, each seen at a check every 5 s.
    let mut initiator = Initiator::begin(&mut target, &[]);
    let seconds = initiator.seconds_until_closed(&mut target, 200).unwrap();
    assert!((85..=105).contains(&seconds), "{seconds}");
    let ping = NopIn::decode(&initiator.received).unwrap();
    assert_eq!(ping.initiator_task_tag, RESERVED_TAG);
    // An R2T is not answered.
    let mut initiator = Initiator::begin(&mut target, &[("ImmediateData", "No")]);
    initiator.command(&mut target, transfer(WRITE, 0, 8), 4096, (false, true), &[], true);
    let seconds = initiator.seconds_until_closed(&mut target, 200).unwrap();
    assert!((30..=40).contains(&seconds), "{seconds}");
}

/// A ping that is to be answered.
fn ping(initiator: &Initiator) -> NopOut {
    NopOut {
        immediate: true,
        initiator_task_tag: 3,
        target_transfer_tag: RESERVED_TAG,
        cmd_sn: initiator.cmd_sn,
        ..NopOut::default()
    }
}

#[test]
fn pings_are_answered_and_unknown_pdus_rejected() {
    let mut target = plain_target();
    let mut initiator = Initiator::begin(&mut target, &[]);
    let ping = ping(&initiator);
    initiator.send_pdu(&mut target, &ping.to_bytes(), b"echo");
    let answer = initiator.read(&mut target);
    assert_eq!((answer.opcode(), answer.data.as_slice()), (Opcode::NopIn, b"echo".as_slice()));
    let mut unknown = ping.to_bytes();
    unknown[0] = 0x5e;
    initiator.send_pdu(&mut target, &unknown, b"data");
    let reject = initiator.read(&mut target);
    assert_eq!(Reject::decode(&reject.header).unwrap().reason, u8::from(RejectReason::CommandNotSupported));
    assert_eq!(reject.data[0], 0x5e);
    let logout =
        LogoutRequest { initiator_task_tag: 4, cmd_sn: initiator.cmd_sn, ..LogoutRequest::default() };
    initiator.send_pdu(&mut target, &logout.to_bytes(), &[]);
    let answer = LogoutReply::decode(&initiator.read(&mut target).header).unwrap();
    assert_eq!(answer.response, u8::from(LogoutResponse::Closed));
    assert!(initiator.try_read(&mut target).is_none());
}

#[test]
fn the_texts_of_arbitrary_logins_can_be_valid() {
    let spell = |tokens: &[&str]| -> Vec<u8> {
        let number = |token: &&str| TOKENS.iter().position(|known| known == token).unwrap() as u8;
        tokens.iter().map(number).collect()
    };
    let names = ["InitiatorName=", INITIATOR, "\0", "TargetName=", NODE, "\0"];
    let security = spell(&[&names[..], &["AuthMethod=", "CHAP", "\0"]].concat());
    let digests = spell(&[&names[..], &["HeaderDigest=", "CRC32C", ",", "None", "\0"]].concat());
    // Stages, flags, text; whether authentication is required; status, stage and what the answer has.
    for (start, text, required, status, answer) in [
        ([0b0100, 0], &security, true, 0, "AuthMethod=CHAP\0"),
        ([0b1101, 1], &digests, false, 0, "HeaderDigest=CRC32C\0"),
        ([0b1101, 1], &digests, true, u16::from(LoginStatus::AuthenticationFailed), ""),
        ([0b1101, 5], &digests, false, u16::from(LoginStatus::UnsupportedVersion), ""),
    ] {
        let mut target = plain_target();
        let core = target.reactor.core();
        target.group.apply(&core, Arc::new(config_with_chap(required)), 2);
        let mut initiator = Initiator::connect(&mut target);
        initiator.send(&mut target, &any_login(&[&start[..], text].concat()));
        let received = initiator.read(&mut target);
        assert_eq!(LoginResponse::decode(&received.header).unwrap().status, status, "{start:?} {answer}");
        assert!(String::from_utf8(received.data).unwrap().contains(answer), "{start:?} {answer}");
    }
}

#[test]
fn any_traffic_is_survived() {
    for seed in 0..300 {
        let mut random = WyRand::new(seed);
        let mut bytes: Vec<u8> = (0..random.below(2000)).map(|_| random.below(256) as u8).collect();
        any_bytes(&bytes);
        // The same as logins, most of whose text is made of keys.
        bytes.iter_mut().for_each(|byte| *byte %= 2 * TOKENS.len() as u8);
        bytes.insert(0, 0x20 | ((random.below(2) as u8) << 6));
        any_bytes(&bytes);
    }
}
