//! A host that says whatever it likes, PDU by PDU.

use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::time::Duration;

use ring::Status;
use wire_nvme::digest::crc32c;
use wire_nvme::fabrics::{CONNECT_DATA_SIZE, Connect, ConnectData, Connected, PropertySet};
use wire_nvme::io::ReadWrite;
use wire_nvme::opcode::NvmOpcode;
use wire_nvme::registers::offset;
use wire_nvme::tcp::{
    C2hData, CAPSULE_CMD_SIZE, COMMON_SIZE, CapsuleCmd, CapsuleResp, CommonHeader, Fatal, Framing, H2cData,
    IC_SIZE, IcReq, IcResp, Layout, PduType, R2t, SHORT_SIZE, TermReq,
};
use wire_nvme::{Cqe, DataPointer, Sqe};

use crate::rig::{NQN, Rig};

pub(crate) const HOST: &str = "nqn.2014-08.org.nvmexpress:uuid:6d5c7a3e-0a52-4d5f-9d0b-7d3a1f7d2c11";
/// CC as Linux writes it to enable a controller.
const ENABLE: u64 = 0x0046_0001;
/// Longest silence of a target that has something to say, on a busy machine.
const PATIENCE: Duration = Duration::from_secs(10);

/// What a target said.
#[derive(Debug, PartialEq)]
pub(crate) enum Said {
    IcResp(IcResp),
    Response(Cqe),
    Data(C2hData, Vec<u8>),
    R2t(R2t),
    /// C2HTermReq, with the start of the PDU in error.
    Term(Fatal, Vec<u8>),
    /// The connection is over.
    Closed,
}

pub(crate) struct Peer {
    pub(crate) stream: TcpStream,
    /// Both ways: the host asks for no padding, and our controller for none.
    pub(crate) framing: Framing,
    pub(crate) cntlid: u16,
}

impl Peer {
    /// A connection on which nothing was said.
    pub(crate) fn dial(rig: &Rig) -> Peer {
        let stream = TcpStream::connect(rig.address.socket().unwrap()).unwrap();
        stream.set_nodelay(true).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        Peer { stream, framing: Framing::PLAIN, cntlid: 0xffff }
    }

    /// A connection with ICReq behind it.
    pub(crate) fn initialized(rig: &Rig, digests: bool) -> Peer {
        let mut peer = Peer::dial(rig);
        peer.send(&ic_req(digests));
        let Said::IcResp(answer) = peer.hear() else { panic!("no ICResp") };
        assert_eq!((answer.header_digest, answer.data_digest), (digests, digests));
        peer.framing = Framing { header_digest: digests, data_digest: digests, ..Framing::PLAIN };
        peer
    }

    /// An admin queue of an enabled controller.
    pub(crate) fn admin(rig: &Rig) -> Peer {
        Peer::admin_as(rig, [1; 16])
    }

    /// The same for a host with another identifier.
    pub(crate) fn admin_as(rig: &Rig, host_id: [u8; 16]) -> Peer {
        let mut peer = Peer::initialized(rig, false);
        let (sqe, data) = connect_as(0, 32, 0xffff, host_id);
        let answer = peer.command(sqe, &data);
        assert_eq!(answer.status, Status::SUCCESS);
        peer.cntlid = Connected::from_result(answer.result).cntlid;
        let enable = PropertySet { wide: false, offset: offset::CC, value: ENABLE };
        assert_eq!(peer.command(enable.to_sqe(), &[]).status, Status::SUCCESS);
        peer
    }

    /// An I/O queue of the admin queue's controller.
    pub(crate) fn io(rig: &Rig, admin: &Peer, qid: u16, entries: u32, digests: bool) -> Peer {
        Peer::io_as(rig, admin, qid, entries, digests, [1; 16])
    }

    /// The same for a host with another identifier.
    pub(crate) fn io_as(
        rig: &Rig,
        admin: &Peer,
        qid: u16,
        entries: u32,
        digests: bool,
        host_id: [u8; 16],
    ) -> Peer {
        let mut peer = Peer::initialized(rig, digests);
        let (sqe, data) = connect_as(qid, entries, admin.cntlid, host_id);
        assert_eq!(peer.command(sqe, &data).status, Status::SUCCESS);
        peer
    }

    pub(crate) fn send(&mut self, bytes: &[u8]) {
        self.stream.write_all(bytes).unwrap();
    }

    /// A command capsule with data behind it.
    pub(crate) fn capsule(&mut self, sqe: Sqe, data: &[u8]) {
        let bytes = capsule(&self.framing, sqe, data);
        self.send(&bytes);
    }

    /// A piece of the data that an R2T asks for.
    pub(crate) fn data(&mut self, r2t: &R2t, offset: u32, data: &[u8], last: bool) {
        let bytes = h2c_data(&self.framing, r2t, offset, data, last);
        self.send(&bytes);
    }

    /// The next PDU.
    pub(crate) fn hear(&mut self) -> Said {
        let mut start = [0; COMMON_SIZE];
        if !self.read(&mut start) {
            return Said::Closed;
        }
        let common = CommonHeader::decode(&start).unwrap();
        let mut pdu = start.to_vec();
        pdu.resize(common.plen as usize, 0);
        assert!(self.read(&mut pdu[COMMON_SIZE..]), "the target closed within a PDU: {common:?}");
        let layout = common.layout(&self.framing).unwrap();
        if layout.header_digest {
            let (header, rest) = pdu.split_at(layout.header_length.into());
            assert_eq!(crc32c(header).to_le_bytes(), rest[..4], "header digest");
        }
        let data_at = usize::from(layout.data_offset);
        let data = pdu[data_at..data_at + layout.data_length as usize].to_vec();
        if layout.data_digest {
            assert_eq!(crc32c(&data).to_le_bytes(), pdu[pdu.len() - 4..], "data digest");
        }
        let short = pdu.first_chunk::<SHORT_SIZE>().unwrap();
        match common.kind {
            PduType::IcResp => Said::IcResp(IcResp::decode(pdu.first_chunk().unwrap()).unwrap()),
            PduType::CapsuleResp => Said::Response(CapsuleResp::decode(short)),
            PduType::C2hData => Said::Data(C2hData::decode(short), data),
            PduType::R2t => Said::R2t(R2t::decode(short)),
            PduType::C2hTermReq => {
                Said::Term(TermReq::decode(common.kind, short).unwrap().fatal, pdu[SHORT_SIZE..].to_vec())
            }
            other => panic!("a target never sends {other:?}"),
        }
    }

    /// Reads all of `into`; false at the end of the connection, however it ended.
    fn read(&mut self, into: &mut [u8]) -> bool {
        match self.stream.read_exact(into) {
            Ok(()) => true,
            Err(error) if error.kind() == ErrorKind::WouldBlock => panic!("the target is silent"),
            Err(_) => false,
        }
    }

    pub(crate) fn hear_response(&mut self) -> Cqe {
        match self.hear() {
            Said::Response(cqe) => cqe,
            other => panic!("no response, but {other:?}"),
        }
    }

    pub(crate) fn hear_r2t(&mut self) -> R2t {
        match self.hear() {
            Said::R2t(r2t) => r2t,
            other => panic!("no R2T, but {other:?}"),
        }
    }

    /// Everything until the end of the connection is thrown away.
    pub(crate) fn hear_end(&mut self) {
        while self.hear() != Said::Closed {}
    }

    /// A command, its data in the capsule, and its response.
    pub(crate) fn command(&mut self, sqe: Sqe, data: &[u8]) -> Cqe {
        self.capsule(sqe, data);
        let cqe = self.hear_response();
        assert_eq!(cqe.cid, sqe.cid);
        cqe
    }

    pub(crate) fn write(&mut self, nsid: u32, lba: u64, data: &[u8]) -> Status {
        self.command(write_in_capsule(nsid, lba, data.len()), data).status
    }

    pub(crate) fn read_back(&mut self, nsid: u32, lba: u64, bytes: usize) -> Result<Vec<u8>, Status> {
        self.capsule(read(nsid, lba, bytes), &[]);
        match self.hear() {
            Said::Data(pdu, data) => {
                assert!(pdu.last && pdu.offset == 0 && !pdu.success);
                let status = self.hear_response().status;
                if status.is_success() { Ok(data) } else { Err(status) }
            }
            Said::Response(cqe) => Err(cqe.status),
            other => panic!("a read is answered with {other:?}"),
        }
    }

    /// Writes and reads some blocks: proof that the target is there and well.
    pub(crate) fn round_trip(&mut self, salt: u8) {
        let data = pattern(4096, salt);
        assert_eq!(self.write(1, 64, &data), Status::SUCCESS);
        assert_eq!(self.read_back(1, 64, 4096), Ok(data));
    }
}

pub(crate) fn pattern(bytes: usize, salt: u8) -> Vec<u8> {
    (0..bytes).map(|at| (at % 251) as u8 ^ salt).collect()
}

pub(crate) fn ic_req(digests: bool) -> [u8; IC_SIZE] {
    let mut pdu = [0; IC_SIZE];
    let request =
        IcReq { host_data_alignment_bytes: 4, header_digest: digests, data_digest: digests, r2t_max: 1 };
    request.encode(&mut pdu);
    pdu
}

fn with_data(header: &[u8], layout: &Layout, data: &[u8]) -> Vec<u8> {
    let mut pdu = header.to_vec();
    if layout.header_digest {
        pdu.extend(crc32c(header).to_le_bytes());
    }
    pdu.resize(layout.prefix_length(), 0);
    pdu.extend(data);
    if layout.data_digest {
        pdu.extend(crc32c(data).to_le_bytes());
    }
    pdu
}

pub(crate) fn capsule(framing: &Framing, sqe: Sqe, data: &[u8]) -> Vec<u8> {
    let mut header = [0; CAPSULE_CMD_SIZE];
    let layout = CapsuleCmd { sqe, data_length: data.len() as u32 }.encode(framing, &mut header);
    with_data(&header, &layout, data)
}

pub(crate) fn h2c_data(framing: &Framing, r2t: &R2t, offset: u32, data: &[u8], last: bool) -> Vec<u8> {
    let mut header = [0; SHORT_SIZE];
    let (cccid, ttag, length) = (r2t.cccid, r2t.ttag, data.len() as u32);
    let layout = H2cData { cccid, ttag, offset, length, last }.encode(framing, &mut header);
    with_data(&header, &layout, data)
}

pub(crate) fn connect(qid: u16, queue_entries: u32, cntlid: u16) -> (Sqe, [u8; CONNECT_DATA_SIZE]) {
    connect_as(qid, queue_entries, cntlid, [1; 16])
}

pub(crate) fn connect_as(
    qid: u16,
    queue_entries: u32,
    cntlid: u16,
    host_id: [u8; 16],
) -> (Sqe, [u8; CONNECT_DATA_SIZE]) {
    let command =
        Connect { record_format: 0, qid, queue_entries, attributes: Default::default(), kato_ms: 0 };
    let mut data = [0; CONNECT_DATA_SIZE];
    let (subnqn, hostnqn) = (NQN.parse().unwrap(), HOST.parse().unwrap());
    ConnectData { host_id, cntlid, subnqn, hostnqn }.encode(&mut data);
    (Sqe { data: DataPointer::capsule(0, data.len() as u32), ..command.to_sqe() }, data)
}

fn read_write(opcode: NvmOpcode, nsid: u32, lba: u64, bytes: usize, data: DataPointer) -> Sqe {
    let command = ReadWrite { lba, blocks: (bytes / 512) as u32, ..ReadWrite::default() };
    Sqe { nsid, data, cid: 7, ..command.to_sqe(opcode) }
}

pub(crate) fn read(nsid: u32, lba: u64, bytes: usize) -> Sqe {
    read_write(NvmOpcode::Read, nsid, lba, bytes, DataPointer::transport(bytes as u32))
}

/// A write whose data waits to be asked for.
pub(crate) fn write(nsid: u32, lba: u64, bytes: usize) -> Sqe {
    read_write(NvmOpcode::Write, nsid, lba, bytes, DataPointer::transport(bytes as u32))
}

pub(crate) fn write_in_capsule(nsid: u32, lba: u64, bytes: usize) -> Sqe {
    read_write(NvmOpcode::Write, nsid, lba, bytes, DataPointer::capsule(0, bytes as u32))
}
