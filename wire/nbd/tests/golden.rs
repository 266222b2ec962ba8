//! The encodings against a session of libnbd 1.14 with qemu-nbd 7.2, and extended headers against the
//! specification.
#![allow(clippy::unwrap_used)]

use wire_nbd::*;

fn bytes(hex: &str) -> Vec<u8> {
    let digits: Vec<u8> = hex.bytes().filter(u8::is_ascii_hexdigit).collect();
    digits.chunks(2).map(|pair| u8::from_str_radix(std::str::from_utf8(pair).unwrap(), 16).unwrap()).collect()
}

fn array<const N: usize>(hex: &str) -> [u8; N] {
    bytes(hex).try_into().unwrap()
}

#[test]
fn the_handshake_of_libnbd_and_qemu() {
    let greeting = array("4e42444d41474943 49484156454f5054 0003");
    let decoded = NbdGreeting::decode(&greeting).unwrap();
    assert_eq!(decoded.flags, HandshakeFlags::FIXED_NEWSTYLE | HandshakeFlags::NO_ZEROES);
    assert_eq!(decoded.to_bytes(), greeting);
    let flags = ClientFlags::decode(array("00000003")).unwrap();
    assert_eq!(flags, ClientFlags::FIXED_NEWSTYLE | ClientFlags::NO_ZEROES);
    assert_eq!(flags.to_bytes(), [0, 0, 0, 3]);
    assert!(ClientFlags::decode([0, 0, 0, 4]).is_err());

    let option = array("49484156454f5054 00000008 00000000");
    let header = OptionHeader { option: OptionCode::StructuredReply as u32, length: 0 };
    assert_eq!(OptionHeader::decode(&option), Ok(header));
    assert_eq!(header.to_bytes(), option);
    let ack = array("0003e889045565a9 00000008 00000001 00000000");
    let reply = OptionReplyHeader { option: 8, kind: OptionReplyKind::Ack, length: 0 };
    assert_eq!((OptionReplyHeader::decode(&ack), reply.to_bytes()), (Ok(reply), ack));

    let option = OptionHeader { option: OptionCode::SetMetaContext as u32, length: 31 };
    assert_eq!(option.to_bytes(), array("49484156454f5054 0000000a 0000001f"));
    let query = bytes("00000004 6469736b 00000001 0000000f 626173653a616c6c6f636174696f6e");
    let request = MetaContextRequest::decode(&query).unwrap();
    assert_eq!((request.name, request.count), ("disk", 1));
    assert_eq!(request.queries().collect::<Vec<_>>(), [BASE_ALLOCATION]);
    let mut written = Vec::new();
    MetaContextRequest::encode("disk", &[BASE_ALLOCATION], &mut written);
    assert_eq!(written, query);

    let option = OptionHeader { option: OptionCode::Go as u32, length: 16 };
    assert_eq!(option.to_bytes(), array("49484156454f5054 00000007 00000010"));
    let go = bytes("00000004 6469736b 0003 0003 0001 0002");
    let request = InfoRequest::decode(&go).unwrap();
    assert_eq!((request.name, request.kinds().collect::<Vec<_>>()), ("disk", vec![3, 1, 2]));
    assert!(request.asks(InfoKind::Name) && !request.asks(InfoKind::Export));
    let mut written = Vec::new();
    InfoRequest::encode("disk", &[3, 1, 2], &mut written);
    assert_eq!(written, go);
}

#[test]
fn the_information_of_qemu() {
    let flags = TransmissionFlags::from_bits_retain(0x0ced);
    assert!(flags.contains(TransmissionFlags::SEND_CACHE | TransmissionFlags::SEND_FAST_ZERO));
    assert!(!flags.contains(TransmissionFlags::CAN_MULTI_CONN));
    let table = [
        ("0001 6469736b", Info::Name("disk")),
        ("0002 61206469736b", Info::Description("a disk")),
        (
            "0003 00000001 00001000 02000000",
            Info::BlockSize { minimum: 1, preferred: 4096, payload_max: 32 << 20 },
        ),
        ("0000 0000000000100000 0ced", Info::Export(ExportReply { size: 1 << 20, flags })),
    ];
    for (hex, info) in table {
        let mut written = Vec::new();
        info.encode(&mut written);
        assert_eq!((Info::decode(&bytes(hex)), written), (Ok(info), bytes(hex)));
    }
}

#[test]
fn the_requests_of_libnbd() {
    let request = |command, flags, cookie, offset, length| RequestHeader {
        flags: CommandFlags::from_bits_retain(flags),
        command: u16::from(command),
        cookie,
        offset,
        length,
    };
    let table = [
        (
            "25609513 0000 0000 0000000000000001 0000000000010000 00000010",
            request(NbdCommand::Read, 0, 1, 65536, 16),
        ),
        (
            "25609513 0001 0001 0000000000000002 0000000000000003 00000005",
            request(NbdCommand::Write, 1, 2, 3, 5),
        ),
        (
            "25609513 0000 0003 0000000000000003 0000000000000000 00000000",
            request(NbdCommand::Flush, 0, 3, 0, 0),
        ),
        (
            "25609513 0000 0004 0000000000000004 0000000000000000 00001000",
            request(NbdCommand::Trim, 0, 4, 0, 4096),
        ),
        (
            "25609513 0002 0006 0000000000000005 0000000000002000 00001000",
            request(NbdCommand::WriteZeroes, 2, 5, 8192, 4096),
        ),
        (
            "25609513 0000 0007 0000000000000006 0000000000000000 00020000",
            request(NbdCommand::BlockStatus, 0, 6, 0, 131_072),
        ),
        (
            "25609513 0000 0002 0000000000000008 0000000000000000 00000000",
            request(NbdCommand::Disc, 0, 8, 0, 0),
        ),
    ];
    for (hex, request) in table {
        let mut written = [0; HeaderForm::REQUEST_SIZE_MAX];
        let size = request.encode(HeaderForm::Compact, &mut written);
        let decoded = RequestHeader::decode(HeaderForm::Compact, &bytes(hex));
        assert_eq!((decoded, &written[..size]), (Ok(request), &bytes(hex)[..]));
    }
}

#[test]
fn the_replies_of_qemu() {
    let simple = array("67446698 00000000 0000000000000002");
    let reply = SimpleReply { error: 0, cookie: 2 };
    let mut written = [0; SimpleReply::SIZE];
    reply.encode(&mut written);
    assert_eq!((SimpleReply::decode(&simple), written), (Ok(reply), simple));

    let chunk =
        |kind, cookie, length| ChunkHeader { flags: ChunkFlags::DONE, kind, cookie, offset: 0, length };
    let table = [
        ("668e33ef 0001 0001 0000000000000001 00000018", chunk(ChunkKind::OffsetData, 1, 24)),
        ("668e33ef 0001 0005 0000000000000006 0000001c", chunk(ChunkKind::BlockStatus, 6, 28)),
        ("668e33ef 0001 8001 0000000000000007 0000003f", chunk(ChunkKind::Error, 7, 63)),
    ];
    for (hex, chunk) in table {
        let mut written = [0; HeaderForm::CHUNK_SIZE_MAX];
        let size = chunk.encode(HeaderForm::Compact, &mut written);
        let decoded = ChunkHeader::decode(HeaderForm::Compact, &bytes(hex));
        assert_eq!((decoded, &written[..size]), (Ok(chunk), &bytes(hex)[..]));
    }
    assert_eq!(
        ErrorChunk::decode(&array("00000016 0039")),
        Ok(ErrorChunk { error: NbdError::Inval.value() })
    );
    let extent = Extent { length: 0xf000, flags: state::HOLE | state::ZERO };
    assert_eq!(Extent::decode(HeaderForm::Compact, &bytes("0000f000 00000003")), Ok(extent));
}

/// doc/proto.md, "Extended request message", "Extended reply chunk message" and
/// `NBD_REPLY_TYPE_BLOCK_STATUS_EXT`.
#[test]
fn extended_headers_of_the_specification() {
    let request = RequestHeader {
        flags: CommandFlags::PAYLOAD_LEN,
        command: NbdCommand::Write.into(),
        cookie: 0x0102_0304_0506_0708,
        offset: 1 << 40,
        length: 1 << 20,
    };
    let hex = bytes("21e41c71 0020 0001 0102030405060708 0000010000000000 0000000000100000");
    let mut written = [0; HeaderForm::REQUEST_SIZE_MAX];
    assert_eq!(request.encode(HeaderForm::Extended, &mut written), 32);
    assert_eq!((RequestHeader::decode(HeaderForm::Extended, &hex), &written[..]), (Ok(request), &hex[..]));
    assert!(RequestHeader::decode(HeaderForm::Compact, &hex).is_err());

    let chunk = ChunkHeader {
        flags: ChunkFlags::DONE,
        kind: ChunkKind::BlockStatusExt,
        cookie: 9,
        offset: 4096,
        length: 24,
    };
    let hex = bytes("6e8a278c 0001 0006 0000000000000009 0000000000001000 0000000000000018");
    let mut written = [0; HeaderForm::CHUNK_SIZE_MAX];
    assert_eq!(chunk.encode(HeaderForm::Extended, &mut written), 32);
    assert_eq!((ChunkHeader::decode(HeaderForm::Extended, &hex), &written[..]), (Ok(chunk), &hex[..]));
    let extent = Extent { length: 1 << 33, flags: 3 };
    let mut written = [0; 16];
    extent.encode(HeaderForm::Extended, &mut written);
    assert_eq!(written, array("0000000200000000 0000000000000003"));
}
