//! PDUs of NVMe/TCP.

use block_io::Status;
use wire_nvme::fabrics::*;
use wire_nvme::opcode::NvmOpcode;
use wire_nvme::tcp::*;
use wire_nvme::{Cqe, DataPointer, Sqe};

use super::{encoded, hex, sparse};

fn layout(bytes: &[u8], framing: &Framing) -> PduLayout {
    CommonHeader::decode(bytes.first_chunk().unwrap()).unwrap().layout(framing).unwrap()
}

const BOTH: Framing = Framing { header_digest: true, data_digest: true, data_alignment_bytes: 4 };

#[test]
fn tcp_initialization() {
    let bytes: [u8; 128] = sparse("2=80 4=80 10=030303");
    let view = IcReq { host_data_alignment_bytes: 16, header_digest: true, data_digest: true, r2t_max: 4 };
    assert_eq!(IcReq::decode(&bytes), Ok(view));
    assert_eq!(encoded(|into| view.encode(into)), bytes);
    assert_eq!(layout(&bytes, &Framing::PLAIN).prefix_length(), 128);

    let bytes: [u8; 128] = sparse("0=01 2=80 4=80 10=1f02 14=02");
    let view = IcResp {
        controller_data_alignment_bytes: 128,
        header_digest: false,
        data_digest: true,
        h2c_data_max_bytes: 0x2_0000,
    };
    assert_eq!(IcResp::decode(&bytes), Ok(view));
    assert_eq!(encoded(|into| view.encode(into)), bytes);

    let bytes: [u8; 24] = hex("030018006000000001000400000000000000000000000000");
    let view = TermReq { kind: PduType::C2hTermReq, fatal: FatalError::field(4) };
    assert_eq!(TermReq::decode(PduType::C2hTermReq, &bytes), Ok(view));
    let mut made = [0; TERM_MAX];
    assert_eq!(view.encode(&[0x77; 72], &mut made), 96);
    assert_eq!((&made[..24], &made[24..96]), (&bytes[..], &[0x77; 72][..]));
    assert_eq!(layout(&bytes, &BOTH).data_length, 72);
}

#[test]
fn tcp_data() {
    let bytes: [u8; 24] = hex("0607181c2010000034127856001000000010000000000000");
    let view = H2cData { cccid: 0x1234, ttag: 0x5678, offset: 0x1000, length: 4096, last: true };
    assert_eq!(H2cData::decode(&bytes), view);
    let parts = layout(&bytes, &BOTH);
    let expected = PduLayout {
        header_length: 24,
        header_digest: true,
        data_offset: 28,
        data_length: 4096,
        data_digest: true,
        length: 4128,
    };
    assert_eq!(parts, expected);
    assert_eq!(encoded(|into| assert_eq!(view.encode(&BOTH, into), expected)), bytes);

    let bytes: [u8; 24] = hex("070c18181802000034120000000200000002000000000000");
    let view = C2hData { cccid: 0x1234, offset: 0x200, length: 512, last: true, success: true };
    assert_eq!(C2hData::decode(&bytes), view);
    assert_eq!(layout(&bytes, &Framing::PLAIN).prefix_length(), 24);
    assert_eq!(encoded(|into| _ = view.encode(&Framing::PLAIN, into)), bytes);

    let bytes: [u8; 24] = hex("090118001c00000034127856002000000000020000000000");
    let view = R2t { cccid: 0x1234, ttag: 0x5678, offset: 0x2000, length: 0x2_0000 };
    assert_eq!(R2t::decode(&bytes), view);
    assert_eq!(layout(&bytes, &BOTH).prefix_length(), 28);
    assert_eq!(encoded(|into| _ = view.encode(&BOTH, into)), bytes);
}

#[test]
fn tcp_capsules() {
    let bytes: [u8; 24] = hex("050018001800000000000000000000000300000007000000");
    let cqe = Cqe { sqhd: 3, ..Cqe::new(7, Status::SUCCESS) };
    assert_eq!(CapsuleResp::decode(&bytes), cqe);
    assert_eq!(encoded(|into| _ = CapsuleResp { cqe }.encode(&Framing::PLAIN, into)), bytes);

    let bytes: [u8; 72] = hex("0400484848020000014009000100000000000000000000000000000000000000\
         000000000000000000020000000000010000000000000000000000000000000000000000000000\
00");
    let sqe =
        Sqe { cid: 9, nsid: 1, data: DataPointer::capsule(0, 512), ..Sqe::new(NvmOpcode::Write.to_wire()) };
    assert_eq!(CapsuleCmd::decode(&bytes), sqe);
    assert_eq!(layout(&bytes, &Framing::PLAIN).data_length, 512);
    assert_eq!(encoded(|into| _ = CapsuleCmd { sqe, data_length: 512 }.encode(&Framing::PLAIN, into)), bytes);
}

/// Constants of the Linux kernel (include/linux/nvme.h and nvme-tcp.h, 6.x), used by its initiator.
#[test]
fn constants_of_linux() {
    // NVME_TRANSPORT_SGL_DATA_DESC << 4 | NVME_SGL_FMT_TRANSPORT_A, NVME_SGL_FMT_DATA_DESC << 4 |
    // NVME_SGL_FMT_OFFSET, NVME_CMD_SGL_METABUF.
    assert_eq!((DataPointer::TRANSPORT, DataPointer::CAPSULE, Sqe::FLAGS_SGL), (5 << 4 | 0xa, 1, 1 << 6));
    // enum nvme_tcp_pdu_flags.
    let flags = [tcp_flags(PduFlags::HEADER_DIGEST), tcp_flags(PduFlags::DATA_DIGEST)];
    assert_eq!((flags, tcp_flags(PduFlags::LAST), tcp_flags(PduFlags::SUCCESS)), ([1, 2], 4, 8));
    // enum nvme_tcp_fatal_error_status.
    assert_eq!(FatalStatus::HeaderDigestError as u16, 0x03);
    assert_eq!(FatalStatus::UnsupportedParameter as u16, 0x06);
    // NVME_DISC_SUBSYS_NAME.
    assert_eq!(DISCOVERY_NQN, "nqn.2014-08.org.nvmexpress.discovery");
}

fn tcp_flags(flags: PduFlags) -> u8 {
    flags.bits()
}
