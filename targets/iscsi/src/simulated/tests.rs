mod connections;

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
        Header::decode(&self.header).unwrap().opcode
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
        let length = Header::lengths(&header).1 as usize;
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

    /// Writes blocks in the way that the parameters allow: the first `immediate` bytes come with the command, then
    /// `unsolicited` bytes, then what R2Ts ask for.
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
fn data_arrives_however_it_is_sent_and_the_stream_is_cut() {
    for seed in 0..24 {
        let mut random = WyRand::new(seed);
        let faults = NetworkFaults { cut_per_mille: 500, stall_per_mille: 200, break_per_mille: 0 };
        let mut target = SimulatedTarget::new(seed, faults);
        let digest = if random.below(2) == 0 { "CRC32C" } else { "None" };
        let keys = [
            ("HeaderDigest", digest),
            ("DataDigest", digest),
            ("InitialR2T", "No"),
            ("MaxBurstLength", "16384"),
            ("FirstBurstLength", "8192"),
            ("MaxOutstandingR2T", "3"),
            ("MaxRecvDataSegmentLength", "1000"),
        ];
        let mut initiator = Initiator::begin(&mut target, &keys);
        let mut disk = vec![0; DISK_BYTES];
        for _ in 0..20 {
            let blocks = 1 + random.below(200) as usize;
            let lba = random.below(1000) as usize;
            let data: Vec<u8> = (0..blocks * BLOCK_BYTES).map(|_| random.below(256) as u8).collect();
            let unasked = random.below(8193.min(data.len() as u64 + 1)) as usize;
            let immediate = random.below(unasked as u64 + 1) as usize;
            // Unsolicited data is all of the first burst, or none.
            let first_burst = 8192.min(data.len());
            let unsolicited = if random.below(2) == 0 { 0 } else { first_burst - immediate };
            let segment = 1 + random.below(9000) as usize;
            initiator.write(&mut target, lba as u32, &data, immediate, unsolicited, segment.max(64));
            disk[lba * BLOCK_BYTES..][..data.len()].copy_from_slice(&data);
        }
        for lba in (0..1200).step_by(150) {
            let read = initiator.read_blocks(&mut target, lba as u32, 150, 150 * BLOCK_BYTES as u32);
            assert!(read == disk[lba * BLOCK_BYTES..][..read.len()], "seed {seed}");
            assert_eq!(read.len(), 150 * BLOCK_BYTES);
        }
    }
}

#[test]
fn residuals_say_what_was_not_transferred() {
    let mut target = plain_target();
    let mut initiator = Initiator::begin(&mut target, &[]);
    for (expected, residual, overflow) in [(2000, 1488, false), (300, 212, true), (512, 0, false)] {
        initiator.command(&mut target, transfer(READ, 0, 1), expected, (true, false), &[], true);
        let received = initiator.read(&mut target);
        let pdu = DataIn::decode(&received.header).unwrap();
        assert_eq!(received.data.len(), 512.min(expected as usize));
        assert_eq!(
            (pdu.residual, pdu.overflow, pdu.underflow),
            (residual, overflow, residual > 0 && !overflow)
        );
    }
    // The initiator has more data than blocks.
    initiator.command(&mut target, transfer(WRITE, 0, 1), 2048, (false, true), &[7; 2048], true);
    let response = initiator.read(&mut target).response();
    assert_eq!((response.status, response.residual, response.underflow), (0, 1536, true));
    assert_eq!(initiator.read_blocks(&mut target, 0, 2, 1024)[..513], [[7; 512].as_slice(), &[0]].concat());
}

#[test]
fn wrong_sequences_of_data_fail_the_command_and_nothing_else() {
    let mut target = plain_target();
    let mut initiator = Initiator::begin(&mut target, &[("ImmediateData", "No")]);
    let data = [9; 4096];
    // What differs from the right answer, and the sense code: sequence error, or incorrect amount of data.
    type Change = fn(&mut DataOut);
    let changes: [(Change, (u8, u8)); 4] = [
        (|pdu| pdu.data_sn = 27, (0x47, 5)),
        (|pdu| pdu.buffer_offset = 512, (0x47, 5)),
        (|pdu| pdu.target_transfer_tag ^= 1, (0x47, 5)),
        (|pdu| pdu.target_transfer_tag = RESERVED_TAG, (0x0c, 0x0c)),
    ];
    for (change, sense) in changes {
        initiator.command(&mut target, transfer(WRITE, 0, 8), 4096, (false, true), &[], true);
        let r2t = R2t::decode(&initiator.read(&mut target).header).unwrap();
        assert_eq!((r2t.buffer_offset, r2t.desired_length), (0, 4096));
        let mut pdu = DataOut {
            initiator_task_tag: r2t.initiator_task_tag,
            target_transfer_tag: r2t.target_transfer_tag,
            is_final: true,
            ..DataOut::default()
        };
        change(&mut pdu);
        initiator.data_out(&mut target, pdu, &data[pdu.buffer_offset as usize..]);
        assert_eq!(initiator.read(&mut target).sense(), sense);
    }
    // A sequence that ends early.
    initiator.command(&mut target, transfer(WRITE, 0, 8), 4096, (false, true), &[], true);
    let r2t = R2t::decode(&initiator.read(&mut target).header).unwrap();
    let pdu = DataOut {
        initiator_task_tag: r2t.initiator_task_tag,
        target_transfer_tag: r2t.target_transfer_tag,
        is_final: true,
        ..DataOut::default()
    };
    initiator.data_out(&mut target, pdu, &data[..512]);
    assert_eq!(initiator.read(&mut target).sense(), (0x0c, 0x0d));
    // What comes for it afterwards is dropped.
    initiator.data_out(&mut target, DataOut { buffer_offset: 512, ..pdu }, &data[..512]);
    // Immediate data that was not negotiated.
    initiator.command(&mut target, transfer(WRITE, 0, 1), 512, (false, true), &data[..512], true);
    assert_eq!(initiator.read(&mut target).sense(), (0x0c, 0x0c));
    assert_eq!(initiator.read_blocks(&mut target, 0, 8, 4096), [0; 4096]);
}

#[test]
fn a_wrong_data_digest_fails_the_command_and_a_wrong_header_digest_ends_the_connection() {
    let mut target = plain_target();
    let keys = [("HeaderDigest", "CRC32C"), ("DataDigest", "CRC32C")];
    let mut initiator = Initiator::begin(&mut target, &keys);
    let command = |initiator: &mut Initiator| {
        initiator.cmd_sn += 1;
        let command = ScsiCommand {
            initiator_task_tag: 1,
            is_final: true,
            write: true,
            expected_length: 512,
            cmd_sn: initiator.cmd_sn - 1,
            cdb: transfer(WRITE, 0, 1),
            ..ScsiCommand::default()
        };
        let plain = pdu(&command.to_bytes(), &[5; 512]);
        let (header, data) = plain.split_at(HEADER_BYTES);
        [header, &digest(&[header]), data, &digest(&[data])].concat()
    };
    let mut bytes = command(&mut initiator);
    bytes[100] ^= 1;
    initiator.send(&mut target, &bytes);
    let reject = Reject::decode(&initiator.read(&mut target).header).unwrap();
    assert_eq!(reject.reason, u8::from(RejectReason::DataDigestError));
    assert_eq!(initiator.read(&mut target).sense(), (0x47, 5));
    bytes = command(&mut initiator);
    initiator.send(&mut target, &bytes);
    assert_eq!(initiator.read(&mut target).response().status, 0);
    bytes = command(&mut initiator);
    bytes[30] ^= 1;
    initiator.send(&mut target, &bytes);
    assert!(initiator.try_read(&mut target).is_none());
}

#[test]
fn commands_outside_the_window_are_ignored_and_a_gap_ends_the_connection() {
    let mut target = plain_target();
    let mut initiator = Initiator::begin(&mut target, &[]);
    let ready = |initiator: &mut Initiator, target: &mut SimulatedTarget, cmd_sn: u32| {
        let right = std::mem::replace(&mut initiator.cmd_sn, cmd_sn);
        initiator.command(target, [0; 16], 0, (false, false), &[], true);
        initiator.cmd_sn = right;
    };
    // The depth is 8: numbers 2 to 9 are in the window.
    for ignored in [0, 1, 10, u32::MAX] {
        ready(&mut initiator, &mut target, ignored);
    }
    ready(&mut initiator, &mut target, 2);
    let response = initiator.read(&mut target).response();
    assert_eq!((response.initiator_task_tag, response.exp_cmd_sn, response.max_cmd_sn), (102, 3, 9));
    ready(&mut initiator, &mut target, 4);
    assert!(initiator.try_read(&mut target).is_none());
}

#[test]
fn functions_abort_tasks_and_answer_when_they_have_ended() {
    let mut target = plain_target();
    let mut initiator = Initiator::begin(&mut target, &[("ImmediateData", "No")]);
    for (function, response) in [
        (TaskFunction::AbortTask, TaskResponse::Complete),
        (TaskFunction::AbortTaskSet, TaskResponse::Complete),
        (TaskFunction::ClearTaskSet, TaskResponse::Complete),
        (TaskFunction::LogicalUnitReset, TaskResponse::Complete),
        (TaskFunction::TargetWarmReset, TaskResponse::Complete),
        (TaskFunction::TaskReassign, TaskResponse::ReassignmentNotSupported),
        (TaskFunction::ClearAca, TaskResponse::NotSupported),
    ] {
        // A write that waits for its data.
        let tag = initiator.command(&mut target, transfer(WRITE, 0, 8), 4096, (false, true), &[], true);
        let received = initiator.read(&mut target);
        if received.opcode() != Opcode::R2t {
            // The unit attention after a reset.
            assert_eq!(received.sense().0, 0x29);
            initiator.command(&mut target, transfer(WRITE, 0, 8), 4096, (false, true), &[], true);
            assert_eq!(initiator.read(&mut target).opcode(), Opcode::R2t);
        }
        let referenced_task_tag = initiator.cmd_sn - 1 + 100;
        let request = TaskManagementRequest {
            immediate: true,
            function: function.into(),
            initiator_task_tag: 5,
            referenced_task_tag,
            cmd_sn: initiator.cmd_sn,
            ..TaskManagementRequest::default()
        };
        initiator.send_pdu(&mut target, &request.to_bytes(), &[]);
        let answer = TaskManagementResponse::decode(&initiator.read(&mut target).header).unwrap();
        assert_eq!(
            (answer.initiator_task_tag, answer.response),
            (5, u8::from(response)),
            "{function:?} {tag}"
        );
    }
    let request = TaskManagementRequest {
        immediate: true,
        function: TaskFunction::AbortTask.into(),
        referenced_task_tag: 9999,
        cmd_sn: initiator.cmd_sn,
        ..TaskManagementRequest::default()
    };
    initiator.send_pdu(&mut target, &request.to_bytes(), &[]);
    let answer = TaskManagementResponse::decode(&initiator.read(&mut target).header).unwrap();
    assert_eq!(answer.response, u8::from(TaskResponse::NoTask));
}

#[test]
fn a_login_with_the_same_ports_replaces_the_session() {
    let mut target = plain_target();
    let mut old = Initiator::begin(&mut target, &[("ImmediateData", "No")]);
    old.command(&mut target, transfer(WRITE, 0, 8), 4096, (false, true), &[], true);
    assert_eq!(old.read(&mut target).opcode(), Opcode::R2t);
    let mut new = Initiator::begin(&mut target, &[]);
    assert!(old.try_read(&mut target).is_none());
    assert_eq!(new.read_blocks(&mut target, 0, 1, 512), [0; 512]);
    assert_eq!(target.group.connections().len(), 1);
}

#[test]
fn logins_fail_with_the_status_that_says_why() {
    let mut target = plain_target();
    let name = ("InitiatorName", INITIATOR);
    for (keys, status) in [
        (vec![("TargetName", NODE)], LoginStatus::MissingParameter),
        (vec![name], LoginStatus::MissingParameter),
        (vec![name, ("TargetName", "iqn.2026-11.io.ringbolt:other")], LoginStatus::NotFound),
        (vec![name, ("SessionType", "Other")], LoginStatus::UnsupportedSessionType),
        (vec![name, ("TargetName", NODE), ("AuthMethod", "KRB5")], LoginStatus::AuthenticationFailed),
        (
            vec![name, ("TargetName", NODE), ("X", "1"), ("MaxRecvDataSegmentLength", "1")],
            LoginStatus::InitiatorError,
        ),
    ] {
        let mut initiator = Initiator::connect(&mut target);
        initiator.send(&mut target, &login(&keys));
        let response = LoginResponse::decode(&initiator.read(&mut target).header).unwrap();
        assert_eq!(response.status, u16::from(status), "{keys:?}");
        assert!(initiator.try_read(&mut target).is_none());
    }
    // Changes of the request itself.
    type Change = fn(&mut [u8]);
    let changes: [(Change, LoginStatus); 5] = [
        (|header| header[3] = 1, LoginStatus::UnsupportedVersion),
        (|header| header[1] = 0x8f, LoginStatus::InvalidRequest),
        (|header| header[1] = 0x85, LoginStatus::InvalidRequest),
        (|header| header[1] = 0xc7, LoginStatus::InvalidRequest),
        (|header| header[15] = 77, LoginStatus::NoSession),
    ];
    for (change, status) in changes {
        let mut initiator = Initiator::connect(&mut target);
        let mut bytes = login(&[name, ("TargetName", NODE)]);
        change(&mut bytes);
        initiator.send(&mut target, &bytes);
        let response = LoginResponse::decode(&initiator.read(&mut target).header).unwrap();
        assert_eq!(response.status, u16::from(status));
    }
    // Anything else than a login.
    let mut initiator = Initiator::connect(&mut target);
    initiator.send(&mut target, &pdu(&NopOut::default().to_bytes(), &[]));
    assert!(initiator.try_read(&mut target).is_none());
}

#[test]
fn a_node_that_requires_digests_refuses_logins_without() {
    let mut target = plain_target();
    let digests = DigestPolicy { header_required: false, data_required: true };
    let core = target.reactor.core();
    target.group.apply(&core, Arc::new(config(digests)), 2);
    let mut initiator = Initiator::connect(&mut target);
    initiator.send(&mut target, &login(&[("InitiatorName", INITIATOR), ("TargetName", NODE)]));
    let response = LoginResponse::decode(&initiator.read(&mut target).header).unwrap();
    assert_eq!(response.status, u16::from(LoginStatus::InitiatorError));
    Initiator::begin(&mut target, &[("DataDigest", "None,CRC32C"), ("DataDigestX", "")]).data_digest = true;
}

#[test]
fn discovery_lists_targets_in_pieces_that_the_initiator_takes() {
    let mut target = plain_target();
    let mut initiator = Initiator::connect(&mut target);
    let keys =
        [("InitiatorName", INITIATOR), ("SessionType", "Discovery"), ("MaxRecvDataSegmentLength", "512")];
    initiator.send(&mut target, &login(&keys));
    assert_eq!(LoginResponse::decode(&initiator.read(&mut target).header).unwrap().status, 0);
    let mut request = TextRequest {
        is_final: true,
        target_transfer_tag: RESERVED_TAG,
        initiator_task_tag: 1,
        cmd_sn: 1,
        ..TextRequest::default()
    };
    let unknown = format!("SendTargets=All\0{}", "X-a=b\0".repeat(30));
    initiator.send_pdu(&mut target, &request.to_bytes(), unknown.as_bytes());
    let mut text = Vec::new();
    loop {
        let received = initiator.read(&mut target);
        assert!(received.data.len() <= 512);
        text.extend(received.data);
        let response = TextResponse::decode(&received.header).unwrap();
        if response.is_final {
            assert_eq!(response.target_transfer_tag, RESERVED_TAG);
            break;
        }
        assert!(response.is_continued);
        request.target_transfer_tag = response.target_transfer_tag;
        request.cmd_sn += 1;
        initiator.send_pdu(&mut target, &request.to_bytes(), &[]);
    }
    let expected = format!("TargetName={NODE}\0TargetAddress=10.0.0.1:3260,1\0");
    assert_eq!(String::from_utf8(text).unwrap(), expected + &"X-a=NotUnderstood\0".repeat(30));
    // Commands are for sessions with a target.
    initiator.cmd_sn = request.cmd_sn + 1;
    initiator.command(&mut target, [0; 16], 0, (false, false), &[], true);
    assert_eq!(initiator.read(&mut target).opcode(), Opcode::Reject);
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

#[test]
fn pings_are_answered_and_unknown_pdus_rejected() {
    let mut target = plain_target();
    let mut initiator = Initiator::begin(&mut target, &[]);
    let ping = NopOut {
        immediate: true,
        initiator_task_tag: 3,
        target_transfer_tag: RESERVED_TAG,
        cmd_sn: initiator.cmd_sn,
        ..NopOut::default()
    };
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
fn any_traffic_is_survived() {
    for seed in 0..300 {
        let mut random = WyRand::new(seed);
        let bytes: Vec<u8> = (0..random.below(2000)).map(|_| random.below(256) as u8).collect();
        any_bytes(&bytes);
    }
}
