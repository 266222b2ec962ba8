//! A random load of an initiator that checks each answer: it comes once, in the order of the status numbers,
//! with the data that it has to have.
#![allow(dead_code)]

use std::collections::BTreeMap;

use random::WyRand;
use wire_iscsi::{
    AsyncEvent, AsyncMessage, BasicHeader, DIGEST_BYTES, DataIn, DataOut, HEADER_BYTES, LoginRequest,
    LoginResponse, LoginStage, Opcode, R2t, RESERVED_TAG, ScsiCommand, ScsiResponse, TextWriter, digest,
    padded,
};

/// Bytes of the device that the load uses, from its start.
pub(crate) const LOAD_BYTES: usize = 4 << 20;
/// Commands in flight are in distinct regions: the order of their execution is not defined.
const REGIONS: usize = 32;
const REGION_BYTES: usize = LOAD_BYTES / REGIONS;
const BLOCK_BYTES: usize = 512;
const FIRST_BURST: usize = 8192;

/// How an initiator sends the data of writes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DataStyle {
    pub(crate) immediate: bool,
    pub(crate) initial_r2t: bool,
    pub(crate) digests: bool,
}

impl DataStyle {
    /// One of eight.
    pub(crate) fn of_seed(seed: u64) -> DataStyle {
        DataStyle { immediate: seed & 1 != 0, initial_r2t: seed & 2 != 0, digests: seed & 4 != 0 }
    }
}

/// Sans-IO: [`requests`](Self::requests) returns bytes to send, [`receive`](Self::receive) takes what has
/// arrived. It logs in first. Commands go before data that the target has asked for, as Linux sends them.
///
/// # Panics
/// All of its functions do where the target breaks the protocol or loses data.
pub(crate) struct IscsiLoad {
    random: WyRand,
    style: DataStyle,
    digests: bool,
    depth: usize,
    /// Commands to begin.
    left: usize,
    image: Vec<u8>,
    busy: [bool; REGIONS],
    pending: BTreeMap<u32, Pending>,
    cmd_sn: u32,
    max_cmd_sn: Option<u32>,
    stat_sn: u32,
    received: Vec<u8>,
    /// Other initiators write to the device, so that what is read is not known.
    pub(crate) is_shared: bool,
    /// How often the target has asked for a logout.
    pub(crate) logout_requests: u32,
    /// Commands may fail from some time on.
    pub(crate) may_fail: bool,
    /// Data that was asked for.
    owed: Vec<u8>,
    login: Vec<u8>,
    /// Statuses that are not GOOD: unit attentions.
    pub(crate) attentions: u32,
}

struct Pending {
    region: Option<usize>,
    data: Vec<u8>,
    is_write: bool,
    arrived: usize,
    data_sn: u32,
}

impl IscsiLoad {
    /// A load of this number of commands, up to `depth` at a time, on a device of zeros, by an initiator with
    /// this name.
    pub(crate) fn new(
        seed: u64,
        (initiator, node): (&str, &str),
        style: DataStyle,
        depth: usize,
        commands: usize,
    ) -> IscsiLoad {
        let yes = |is: bool| if is { "Yes" } else { "No" };
        let digests = if style.digests { "CRC32C" } else { "None" };
        let first_burst = FIRST_BURST.to_string();
        let mut text = TextWriter::default();
        for (key, value) in [
            ("InitiatorName", initiator),
            ("TargetName", node),
            ("ImmediateData", yes(style.immediate)),
            ("InitialR2T", yes(style.initial_r2t)),
            ("MaxBurstLength", "16384"),
            ("FirstBurstLength", &first_burst),
            ("MaxOutstandingR2T", "2"),
            ("HeaderDigest", digests),
            ("DataDigest", digests),
        ] {
            text.push(key, value);
        }
        let request = LoginRequest {
            immediate: true,
            transit: true,
            current_stage: LoginStage::Operational.into(),
            next_stage: LoginStage::FullFeature.into(),
            isid: [0x80, 0, 0, 0, 0, 1],
            cmd_sn: 1,
            exp_stat_sn: 1,
            ..LoginRequest::default()
        };
        let login = pdu(&request.to_bytes(), text.bytes(), false);
        IscsiLoad {
            random: WyRand::new(seed),
            style,
            digests: false,
            depth,
            left: commands,
            image: vec![0; LOAD_BYTES],
            busy: [false; REGIONS],
            pending: BTreeMap::new(),
            cmd_sn: 1,
            max_cmd_sn: None,
            stat_sn: 0,
            received: Vec::new(),
            is_shared: false,
            may_fail: false,
            logout_requests: 0,
            owed: Vec::new(),
            login,
            attentions: 0,
        }
    }

    /// Whether all commands are answered.
    pub(crate) fn is_done(&self) -> bool {
        self.left == 0 && self.pending.is_empty() && self.max_cmd_sn.is_some()
    }

    /// Has it begin further commands.
    pub(crate) fn add(&mut self, commands: usize) {
        self.left += commands;
    }

    /// Begins commands, as many as may be in flight, and then sends the data that is owed.
    pub(crate) fn requests(&mut self) -> Vec<u8> {
        let mut bytes = std::mem::take(&mut self.login);
        let Some(max_cmd_sn) = self.max_cmd_sn else { return bytes };
        let depth = if self.attentions == 0 { 1 } else { self.depth };
        while self.left > 0 && self.pending.len() < depth && max_cmd_sn.wrapping_sub(self.cmd_sn) < 1 << 31 {
            self.left -= 1;
            self.begin(&mut bytes);
        }
        bytes.append(&mut self.owed);
        bytes
    }

    fn begin(&mut self, bytes: &mut Vec<u8>) {
        let free: Vec<usize> = (0..REGIONS).filter(|region| !self.busy[*region]).collect();
        let random = &mut self.random;
        // The first command gets the unit attention of a new nexus.
        let is_first = self.cmd_sn == 1;
        let kind = if free.is_empty() || is_first { 9 } else { random.below(10) };
        let tag = self.cmd_sn.wrapping_add(1000);
        let (region, is_write) = match kind {
            0..5 => (Some(free[random.index(free.len())]), true),
            5..9 => (Some(free[random.index(free.len())]), false),
            _ => (None, false),
        };
        let blocks_max = if random.happens(300) { 96 } else { 12 };
        let blocks = 1 + random.index(blocks_max);
        let lba = region.unwrap_or(0) * (REGION_BYTES / BLOCK_BYTES)
            + random.index(REGION_BYTES / BLOCK_BYTES - blocks);
        let (offset, length) = (lba * BLOCK_BYTES, blocks * BLOCK_BYTES);
        let mut cdb = [0; 16];
        let mut data = Vec::new();
        if region.is_some() {
            cdb[0] = if is_write { 0x2a } else { 0x28 };
            cdb[2..6].copy_from_slice(&(lba as u32).to_be_bytes());
            cdb[7..9].copy_from_slice(&(blocks as u16).to_be_bytes());
            data = self.image[offset..offset + length].to_vec();
        }
        if is_write {
            let salt = random.next_bits();
            data = (0..length as u64).map(|at| (salt.wrapping_mul(at | 1) >> 24) as u8).collect();
            self.image[offset..offset + length].copy_from_slice(&data);
        }
        let first_burst = length.min(FIRST_BURST);
        let immediate = match is_write && self.style.immediate {
            true if random.happens(800) => first_burst,
            true => random.index(first_burst / 4 + 1) * 4,
            false => 0,
        };
        let is_unsolicited =
            is_write && !self.style.initial_r2t && immediate < first_burst && random.happens(700);
        let command = ScsiCommand {
            initiator_task_tag: tag,
            is_final: !is_unsolicited,
            read: region.is_some() && !is_write,
            write: is_write,
            expected_length: if region.is_some() { length as u32 } else { 0 },
            cmd_sn: self.cmd_sn,
            cdb,
            ..ScsiCommand::default()
        };
        bytes.extend(pdu(&command.to_bytes(), &data[..immediate], self.digests));
        if is_unsolicited {
            bytes.extend(self.data_out(&data, (tag, RESERVED_TAG), immediate, first_burst));
        }
        self.cmd_sn = self.cmd_sn.wrapping_add(1);
        if let Some(region) = region {
            self.busy[region] = true;
        }
        self.pending.insert(tag, Pending { region, data, is_write, arrived: 0, data_sn: 0 });
    }

    /// PDUs with a part of a write's data; `tags` are the initiator's and the target's.
    fn data_out(&mut self, data: &[u8], tags: (u32, u32), from: usize, to: usize) -> Vec<u8> {
        let segment = [1000, 4096, 20_000][self.random.index(3)];
        let mut bytes = Vec::new();
        for (data_sn, part) in data[from..to].chunks(segment).enumerate() {
            let buffer_offset = from + data_sn * segment;
            let header = DataOut {
                initiator_task_tag: tags.0,
                target_transfer_tag: tags.1,
                is_final: buffer_offset + part.len() == to,
                data_sn: data_sn as u32,
                buffer_offset: buffer_offset as u32,
                ..DataOut::default()
            };
            bytes.extend(pdu(&header.to_bytes(), part, self.digests));
        }
        bytes
    }

    /// Takes bytes of the target.
    pub(crate) fn receive(&mut self, bytes: &[u8]) {
        self.received.extend(bytes);
        while let Some((header, data, used)) = self.next_pdu() {
            self.received.drain(..used);
            self.handle(&header, &data);
        }
    }

    fn next_pdu(&self) -> Option<([u8; HEADER_BYTES], Vec<u8>, usize)> {
        let bytes = &self.received[..];
        let header: [u8; HEADER_BYTES] = *bytes.first_chunk()?;
        let length = BasicHeader::lengths(&header).1 as usize;
        let of_digest = if self.digests { DIGEST_BYTES } else { 0 };
        let start = HEADER_BYTES + of_digest;
        let end = start + padded(length);
        let used = if length > 0 { end + of_digest } else { end };
        let data = bytes.get(start..end)?;
        let rest = bytes.get(end..used)?;
        if self.digests {
            assert_eq!(bytes[HEADER_BYTES..start], digest(&[&header]), "a header digest");
            assert!(length == 0 || *rest == digest(&[data]), "a data digest");
        }
        Some((header, data[..length].to_vec(), used))
    }

    fn handle(&mut self, header: &[u8; HEADER_BYTES], data: &[u8]) {
        let opcode = BasicHeader::decode(header).expect("a header").opcode;
        match opcode {
            Opcode::LoginResponse => {
                let response = LoginResponse::decode(header).expect("a response");
                assert_eq!((response.status, response.transit), (0, true));
                (self.stat_sn, self.max_cmd_sn) =
                    (response.stat_sn.wrapping_add(1), Some(response.max_cmd_sn));
                self.digests = self.style.digests;
            }
            Opcode::R2t => {
                let r2t = R2t::decode(header).expect("an R2T");
                let pending = &self.pending[&r2t.initiator_task_tag];
                assert!(pending.is_write, "{r2t:?}");
                let data = pending.data.clone();
                let from = r2t.buffer_offset as usize;
                let tags = (r2t.initiator_task_tag, r2t.target_transfer_tag);
                let owed = self.data_out(&data, tags, from, from + r2t.desired_length as usize);
                self.owed.extend(owed);
            }
            Opcode::DataIn => {
                let header = DataIn::decode(header).expect("data");
                let pending =
                    self.pending.get_mut(&header.initiator_task_tag).expect("a command that is not answered");
                assert!(!pending.is_write && header.data_sn == pending.data_sn, "{header:?}");
                let from = header.buffer_offset as usize;
                assert_eq!(from, pending.arrived, "{header:?}");
                assert!(
                    self.is_shared || pending.data[from..from + data.len()] == *data,
                    "other data: {header:?}"
                );
                pending.arrived += data.len();
                pending.data_sn += 1;
                if header.has_status {
                    self.complete(
                        header.initiator_task_tag,
                        header.status,
                        header.stat_sn,
                        header.max_cmd_sn,
                    );
                }
            }
            Opcode::ScsiResponse => {
                let response = ScsiResponse::decode(header).expect("a response");
                self.complete(
                    response.initiator_task_tag,
                    response.status,
                    response.stat_sn,
                    response.max_cmd_sn,
                );
            }
            Opcode::AsyncMessage => {
                let message = AsyncMessage::decode(header).expect("a message");
                assert_eq!(message.event, u8::from(AsyncEvent::LogoutRequested));
                assert_eq!(message.stat_sn, self.stat_sn, "statuses are in order");
                self.stat_sn = message.stat_sn.wrapping_add(1);
                self.logout_requests += 1;
            }
            other => panic!("{other:?}"),
        }
    }

    fn complete(&mut self, tag: u32, status: u8, stat_sn: u32, max_cmd_sn: u32) {
        let pending = self
            .pending
            .remove(&tag)
            .unwrap_or_else(|| panic!("{tag} is answered twice, or was never asked"));
        assert_eq!(stat_sn, self.stat_sn, "statuses are in order");
        self.stat_sn = stat_sn.wrapping_add(1);
        self.max_cmd_sn = Some(max_cmd_sn);
        if status != 0 && self.may_fail && self.attentions > 0 {
            // What has been written is not known.
        } else if status != 0 {
            // The unit attention of a new nexus.
            assert_eq!((status, self.attentions), (2, 0), "{tag} fails");
            self.attentions += 1;
        } else {
            assert!(pending.is_write || pending.arrived == pending.data.len(), "data of {tag} is missing");
        }
        if let Some(region) = pending.region {
            self.busy[region] = false;
        }
    }
}

/// A PDU: a header that says how long the data is, and the data.
fn pdu(header: &[u8; HEADER_BYTES], data: &[u8], digests: bool) -> Vec<u8> {
    let mut header = *header;
    header[5..8].copy_from_slice(&(data.len() as u32).to_be_bytes()[1..]);
    let mut bytes = header.to_vec();
    if digests {
        bytes.extend(digest(&[&header]));
    }
    let mut data = data.to_vec();
    data.resize(padded(data.len()), 0);
    bytes.extend(&data);
    if digests && !data.is_empty() {
        bytes.extend(digest(&[&data]));
    }
    bytes
}
