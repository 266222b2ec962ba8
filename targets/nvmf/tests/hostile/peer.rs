//! A host that sends arbitrary PDUs over a plain TCP socket.

use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::time::Duration;

use block_io::Status;
use reactor::{Core, IdlePolicy, Reactor, ReactorConfig};
use wire_nvme::digest::crc32c;
use wire_nvme::fabrics::{CONNECT_DATA_SIZE, Connect, ConnectData, ConnectResponse, PropertySet};
use wire_nvme::io::ReadWrite;
use wire_nvme::opcode::NvmOpcode;
use wire_nvme::registers::offset;
use wire_nvme::tcp::{
    C2hData, CAPSULE_CMD_SIZE, COMMON_SIZE, CapsuleCmd, CapsuleResp, CommonHeader, FatalError, Framing,
    H2cData, IC_SIZE, IcReq, IcResp, PduLayout, PduType, R2t, SHORT_SIZE, TermReq,
};
use wire_nvme::{Cqe, DataPointer, Sqe};

use crate::test_target::{NQN, TcpTestTarget};

pub(crate) const HOST: &str = "nqn.2014-08.org.nvmexpress:uuid:6d5c7a3e-0a52-4d5f-9d0b-7d3a1f7d2c11";
/// Value of CC that Linux writes to enable a controller.
const ENABLE: u64 = 0x0046_0001;
/// Receive timeout: generous, for a busy machine.
const RECEIVE_TIMEOUT: Duration = Duration::from_secs(10);

/// A PDU from the target, or the end of the connection.
#[derive(Debug, PartialEq)]
pub(crate) enum ReceivedPdu {
    IcResp(IcResp),
    Response(Cqe),
    Data(C2hData, Vec<u8>),
    R2t(R2t),
    /// C2HTermReq, with the header of the PDU in error.
    Term(FatalError, Vec<u8>),
    /// The target closed the connection.
    Closed,
}

pub(crate) struct RawTcpHost {
    pub(crate) stream: TcpStream,
    /// Framing of both directions: neither side requests padding.
    pub(crate) framing: Framing,
    pub(crate) cntlid: u16,
}

impl RawTcpHost {
    /// A connection before ICReq.
    pub(crate) fn open(rig: &TcpTestTarget) -> RawTcpHost {
        let stream = TcpStream::connect(rig.address.socket().unwrap()).unwrap();
        stream.set_nodelay(true).unwrap();
        stream.set_read_timeout(Some(RECEIVE_TIMEOUT)).unwrap();
        RawTcpHost { stream, framing: Framing::PLAIN, cntlid: 0xffff }
    }

    /// A connection after ICReq and ICResp.
    pub(crate) fn initialized(rig: &TcpTestTarget, digests: bool) -> RawTcpHost {
        let mut peer = RawTcpHost::open(rig);
        peer.send(&ic_req(digests));
        let ReceivedPdu::IcResp(answer) = peer.receive_pdu() else { panic!("no ICResp") };
        assert_eq!((answer.header_digest, answer.data_digest), (digests, digests));
        peer.framing = Framing { header_digest: digests, data_digest: digests, ..Framing::PLAIN };
        peer
    }

    /// An admin queue of an enabled controller.
    pub(crate) fn admin(rig: &TcpTestTarget) -> RawTcpHost {
        RawTcpHost::admin_as(rig, [1; 16])
    }

    /// The same for a host with this host identifier.
    pub(crate) fn admin_as(rig: &TcpTestTarget, host_id: [u8; 16]) -> RawTcpHost {
        RawTcpHost::admin_of(rig, connect_as(0, 32, 0xffff, host_id))
    }

    /// The same with a keep alive timer.
    #[allow(dead_code, reason = "of the tests of moves")]
    pub(crate) fn admin_with_keep_alive(rig: &TcpTestTarget, kato_ms: u32) -> RawTcpHost {
        let (sqe, data) = connect(0, 32, 0xffff);
        // Dword 12 (Fabrics 1.1, section 3.3).
        RawTcpHost::admin_of(rig, (Sqe { cdw12: kato_ms, ..sqe }, data))
    }

    fn admin_of(rig: &TcpTestTarget, (sqe, data): (Sqe, [u8; CONNECT_DATA_SIZE])) -> RawTcpHost {
        let mut peer = RawTcpHost::initialized(rig, false);
        let answer = peer.command(sqe, &data);
        assert_eq!(answer.status, Status::SUCCESS);
        peer.cntlid = ConnectResponse::from_result(answer.result).cntlid;
        let enable = PropertySet { wide: false, offset: offset::CC, value: ENABLE };
        assert_eq!(peer.command(enable.to_sqe(), &[]).status, Status::SUCCESS);
        peer
    }

    /// An I/O queue of the admin queue's controller.
    pub(crate) fn io(
        rig: &TcpTestTarget,
        admin: &RawTcpHost,
        qid: u16,
        entries: u32,
        digests: bool,
    ) -> RawTcpHost {
        RawTcpHost::io_as(rig, admin, qid, entries, digests, [1; 16])
    }

    /// The same for a host with this host identifier.
    pub(crate) fn io_as(
        rig: &TcpTestTarget,
        admin: &RawTcpHost,
        qid: u16,
        entries: u32,
        digests: bool,
        host_id: [u8; 16],
    ) -> RawTcpHost {
        let mut peer = RawTcpHost::initialized(rig, digests);
        let (sqe, data) = connect_as(qid, entries, admin.cntlid, host_id);
        assert_eq!(peer.command(sqe, &data).status, Status::SUCCESS);
        peer
    }

    pub(crate) fn send(&mut self, bytes: &[u8]) {
        self.stream.write_all(bytes).unwrap();
    }

    /// Sends a command capsule with in-capsule data.
    pub(crate) fn capsule(&mut self, sqe: Sqe, data: &[u8]) {
        let bytes = capsule(&self.framing, sqe, data);
        self.send(&bytes);
    }

    /// Sends an H2CData PDU with part of the data that an R2T requests.
    pub(crate) fn data(&mut self, r2t: &R2t, offset: u32, data: &[u8], last: bool) {
        let bytes = h2c_data(&self.framing, r2t, offset, data, last);
        self.send(&bytes);
    }

    /// Receives the next PDU.
    pub(crate) fn receive_pdu(&mut self) -> ReceivedPdu {
        let mut start = [0; COMMON_SIZE];
        if !self.read(&mut start) {
            return ReceivedPdu::Closed;
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
            PduType::IcResp => ReceivedPdu::IcResp(IcResp::decode(pdu.first_chunk().unwrap()).unwrap()),
            PduType::CapsuleResp => ReceivedPdu::Response(CapsuleResp::decode(short)),
            PduType::C2hData => ReceivedPdu::Data(C2hData::decode(short), data),
            PduType::R2t => ReceivedPdu::R2t(R2t::decode(short)),
            PduType::C2hTermReq => ReceivedPdu::Term(
                TermReq::decode(common.kind, short).unwrap().fatal,
                pdu[SHORT_SIZE..].to_vec(),
            ),
            other => panic!("a target never sends {other:?}"),
        }
    }

    /// Reads all of `into`; false at the end of the connection, however it ended.
    fn read(&mut self, into: &mut [u8]) -> bool {
        match self.stream.read_exact(into) {
            Ok(()) => true,
            Err(error) if error.kind() == ErrorKind::WouldBlock => {
                panic!("the target sent nothing before the timeout")
            }
            Err(_) => false,
        }
    }

    pub(crate) fn expect_response(&mut self) -> Cqe {
        match self.receive_pdu() {
            ReceivedPdu::Response(cqe) => cqe,
            other => panic!("expected a response, got {other:?}"),
        }
    }

    pub(crate) fn expect_r2t(&mut self) -> R2t {
        match self.receive_pdu() {
            ReceivedPdu::R2t(r2t) => r2t,
            other => panic!("expected an R2T, got {other:?}"),
        }
    }

    /// Discards everything until the target closes the connection.
    pub(crate) fn receive_until_closed(&mut self) {
        while self.receive_pdu() != ReceivedPdu::Closed {}
    }

    /// Sends a command with in-capsule data and returns its response.
    pub(crate) fn command(&mut self, sqe: Sqe, data: &[u8]) -> Cqe {
        self.capsule(sqe, data);
        let cqe = self.expect_response();
        assert_eq!(cqe.cid, sqe.cid);
        cqe
    }

    pub(crate) fn write(&mut self, nsid: u32, lba: u64, data: &[u8]) -> Status {
        self.command(write_in_capsule(nsid, lba, data.len()), data).status
    }

    pub(crate) fn read_back(&mut self, nsid: u32, lba: u64, bytes: usize) -> Result<Vec<u8>, Status> {
        self.capsule(read(nsid, lba, bytes), &[]);
        match self.receive_pdu() {
            ReceivedPdu::Data(pdu, data) => {
                assert!(pdu.last && pdu.offset == 0 && !pdu.success);
                let status = self.expect_response().status;
                if status.is_success() { Ok(data) } else { Err(status) }
            }
            ReceivedPdu::Response(cqe) => Err(cqe.status),
            other => panic!("a read is answered with {other:?}"),
        }
    }

    /// Writes and reads back some blocks, to prove that the target works.
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

fn with_data(header: &[u8], layout: &PduLayout, data: &[u8]) -> Vec<u8> {
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
    // Hosts that stall have names of their own, and with them bounds of their own.
    let hostnqn = match host_id[0] {
        0..9 => HOST.to_string(),
        number => format!("{}{number:02x}", &HOST[..HOST.len() - 2]),
    };
    let (subnqn, hostnqn) = (NQN.parse().unwrap(), hostnqn.parse().unwrap());
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

/// A write whose data the target requests by R2T.
pub(crate) fn write(nsid: u32, lba: u64, bytes: usize) -> Sqe {
    read_write(NvmOpcode::Write, nsid, lba, bytes, DataPointer::transport(bytes as u32))
}

pub(crate) fn write_in_capsule(nsid: u32, lba: u64, bytes: usize) -> Sqe {
    read_write(NvmOpcode::Write, nsid, lba, bytes, DataPointer::capsule(0, bytes as u32))
}

/// Runs one of our own hosts on a core of its own.
pub(crate) fn on_host<R: 'static, F: Future<Output = R> + 'static>(job: impl FnOnce(Core) -> F) -> R {
    let reactor =
        Reactor::new(&ReactorConfig { idle: IdlePolicy::Sleep, ..ReactorConfig::default() }).unwrap();
    let core = reactor.core();
    reactor.block_on(job(core))
}
