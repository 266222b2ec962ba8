//! A random load of a client that checks each answer: it comes once, with the error and the data that it has
//! to have.
#![allow(dead_code)]

use std::collections::BTreeMap;

use random::WyRand;
use wire_nbd::{
    ChunkFlags, ChunkHeader, ChunkKind, CommandFlags, HeaderForm, NbdCommand, NbdError, RequestHeader,
    SimpleReply,
};

/// Bytes of the device that the load uses, from its start.
pub(crate) const LOAD_BYTES: usize = 1 << 20;
/// Requests in flight are in distinct regions: their order is not defined.
const REGIONS: usize = 32;
const REGION_BYTES: usize = LOAD_BYTES / REGIONS;

/// Sans-IO: [`requests`](Self::requests) returns bytes to send, [`receive`](Self::receive) takes what has
/// arrived.
///
/// # Panics
/// All of its functions do where the server breaks the protocol or loses data.
pub(crate) struct NbdLoad {
    random: WyRand,
    form: HeaderForm,
    depth: usize,
    /// Requests to begin.
    left: usize,
    image: Vec<u8>,
    busy: [bool; REGIONS],
    pending: BTreeMap<u64, Pending>,
    last_cookie: u64,
    received: Vec<u8>,
    /// Other clients write to the device, so that what is read is not known.
    is_shared: bool,
}

struct Pending {
    command: NbdCommand,
    region: Option<usize>,
    offset: usize,
    error: Option<NbdError>,
    /// What a read returns.
    data: Vec<u8>,
    /// The bytes of it that have arrived.
    arrived: Vec<bool>,
}

impl NbdLoad {
    /// A load of this number of requests, up to `depth` at a time, on a device of zeros.
    pub(crate) fn new(seed: u64, form: HeaderForm, depth: usize, requests: usize) -> NbdLoad {
        NbdLoad {
            random: WyRand::new(seed),
            form,
            depth,
            left: requests,
            image: vec![0; LOAD_BYTES],
            busy: [false; REGIONS],
            pending: BTreeMap::new(),
            last_cookie: 0,
            received: Vec::new(),
            is_shared: false,
        }
    }

    /// Whether all requests are answered.
    pub(crate) fn is_done(&self) -> bool {
        self.left == 0 && self.pending.is_empty()
    }

    /// Has it begin further requests.
    pub(crate) fn add(&mut self, requests: usize) {
        self.left += requests;
    }

    /// Continues on a connection that has negotiated another form.
    ///
    /// # Panics
    /// If a request is not answered.
    pub(crate) fn set_form(&mut self, form: HeaderForm) {
        assert!(self.pending.is_empty() && self.received.is_empty());
        self.form = form;
    }

    /// Whether nothing is in flight that its depth waits for.
    pub(crate) fn may_begin(&self) -> bool {
        self.pending.len() < self.depth
    }

    /// As [`receive`](Self::receive), when other clients write to the same blocks: data is not compared.
    pub(crate) fn receive_unchecked(&mut self, bytes: &[u8]) {
        self.is_shared = true;
        self.receive(bytes);
    }

    /// Begins requests, as many as may be in flight.
    pub(crate) fn requests(&mut self) -> Vec<u8> {
        let mut bytes = Vec::new();
        while self.left > 0 && self.pending.len() < self.depth {
            self.left -= 1;
            self.begin(&mut bytes);
        }
        bytes
    }

    fn begin(&mut self, bytes: &mut Vec<u8>) {
        let free: Vec<usize> = (0..REGIONS).filter(|region| !self.busy[*region]).collect();
        let random = &mut self.random;
        let kind = if free.is_empty() { 9 } else { random.below(10) };
        let region = if kind < 8 { Some(free[random.index(free.len())]) } else { None };
        let length_max = if random.happens(200) { REGION_BYTES } else { 5000 };
        let (from, mut length) = (random.index(REGION_BYTES - length_max + 1), 1 + random.index(length_max));
        if random.happens(500) {
            length = length.next_multiple_of(512).min(REGION_BYTES - from);
        }
        let mut offset = region.unwrap_or(0) * REGION_BYTES + from;
        let (command, error) = match kind {
            0..3 => (NbdCommand::Write, None),
            3..6 => (NbdCommand::Read, None),
            6 => (NbdCommand::WriteZeroes, None),
            7 => (NbdCommand::Trim, None),
            // Rejected; its payload is skipped.
            8 => {
                offset = usize::MAX / 4;
                (NbdCommand::Write, Some(NbdError::NoSpc))
            }
            _ => (NbdCommand::Flush, None),
        };
        if command == NbdCommand::Trim {
            // Of what is trimmed nothing is known.
            (offset, length) = (region.unwrap_or(0) * REGION_BYTES, 0);
        }
        self.last_cookie += 1 + random.below(1000);
        let cookie = self.last_cookie;
        let flags = match (command, self.form) {
            (NbdCommand::Write, HeaderForm::Extended) => CommandFlags::PAYLOAD_LEN,
            _ => CommandFlags::empty(),
        };
        let header = RequestHeader {
            flags,
            command: command.into(),
            cookie,
            offset: offset as u64,
            length: length as u64,
        };
        let mut head = [0; HeaderForm::REQUEST_SIZE_MAX];
        let size = header.encode(self.form, &mut head);
        bytes.extend(&head[..size]);
        let mut data = Vec::new();
        match (command, error) {
            (NbdCommand::Write, error) => {
                let salt = random.next_bits();
                let payload: Vec<u8> =
                    (0..length as u64).map(|at| (salt.wrapping_mul(at | 1) >> 24) as u8).collect();
                if error.is_none() {
                    self.image[offset..offset + length].copy_from_slice(&payload);
                }
                bytes.extend(payload);
            }
            (NbdCommand::WriteZeroes, _) => self.image[offset..offset + length].fill(0),
            (NbdCommand::Read, _) => data = self.image[offset..offset + length].to_vec(),
            _ => {}
        }
        if let Some(region) = region {
            self.busy[region] = true;
        }
        let arrived = vec![false; data.len()];
        self.pending.insert(cookie, Pending { command, region, offset, error, data, arrived });
    }

    /// Takes bytes of the server.
    pub(crate) fn receive(&mut self, bytes: &[u8]) {
        self.received.extend(bytes);
        while let Some(used) = self.answer() {
            self.received.drain(..used);
        }
    }

    /// Handles an answer, or a part of one. Returns its bytes, unless more are needed.
    fn answer(&mut self) -> Option<usize> {
        let bytes = &self.received;
        if let Ok(reply) = SimpleReply::decode(bytes.first_chunk()?) {
            assert_eq!(self.form, HeaderForm::Compact, "{reply:?}");
            let pending = self
                .pending
                .get_mut(&reply.cookie)
                .unwrap_or_else(|| panic!("answered twice or never asked: {reply:?}"));
            let data = if reply.error == 0 { pending.data.len() } else { 0 };
            let data = bytes.get(SimpleReply::SIZE..SimpleReply::SIZE + data)?;
            pending.arrived(pending.offset, data, self.is_shared);
            let used = SimpleReply::SIZE + data.len();
            self.complete(reply.cookie, reply.error);
            return Some(used);
        }
        let head = self.form.chunk_size();
        let header = ChunkHeader::decode(self.form, bytes.get(..head)?).expect("a chunk");
        let payload = bytes.get(head..head + header.length as usize)?;
        let pending = self
            .pending
            .get_mut(&header.cookie)
            .unwrap_or_else(|| panic!("answered twice or never asked: {header:?}"));
        let offset = payload.first_chunk().map(|bytes| u64::from_be_bytes(*bytes) as usize);
        let mut error = 0;
        match header.kind {
            ChunkKind::None => assert!(payload.is_empty()),
            ChunkKind::OffsetData => {
                pending.arrived(offset.expect("an offset"), &payload[8..], self.is_shared)
            }
            ChunkKind::OffsetHole => {
                let length = u32::from_be_bytes(payload[8..12].try_into().expect("four bytes"));
                pending.arrived(offset.expect("an offset"), &vec![0; length as usize], self.is_shared);
            }
            ChunkKind::Error => error = u32::from_be_bytes(*payload.first_chunk().expect("an error")),
            other => panic!("{other:?}"),
        }
        let used = head + payload.len();
        if header.flags.contains(ChunkFlags::DONE) {
            self.complete(header.cookie, error);
        }
        Some(used)
    }

    fn complete(&mut self, cookie: u64, error: u32) {
        let pending = self.pending.remove(&cookie).expect("it was looked up");
        let expected = pending.error.map_or(0, NbdError::value);
        assert_eq!(error, expected, "{:?} at {}", pending.command, pending.offset);
        assert!(error != 0 || pending.arrived.iter().all(|arrived| *arrived), "data is missing");
        if let Some(region) = pending.region {
            self.busy[region] = false;
        }
    }
}

impl Pending {
    /// Compares data of a read, from byte `offset` of the device.
    fn arrived(&mut self, offset: usize, data: &[u8], is_shared: bool) {
        let range = offset - self.offset..offset - self.offset + data.len();
        assert!(is_shared || self.data[range.clone()] == *data, "other data at {offset} + {}", data.len());
        let arrived = &mut self.arrived[range];
        assert!(arrived.iter().all(|arrived| !arrived), "data at {offset} arrives twice");
        arrived.fill(true);
    }
}
