//! Arbitrary bytes are decoded or rejected, and decoded values round-trip.

use proptest::prelude::*;
use wire_nbd::*;

proptest! {
    #[test]
    fn arbitrary_headers_round_trip(mut bytes in proptest::collection::vec(any::<u8>(), 40), magic in 0usize..9) {
        // A magic number makes it likely that the rest is decoded.
        let magics: [&[u8]; 9] = [
            b"NBDMAGICIHAVEOPT", b"IHAVEOPT", &[0, 3, 0xe8, 0x89, 4, 0x55, 0x65, 0xa9], &[0x25, 0x60, 0x95, 0x13],
            &[0x21, 0xe4, 0x1c, 0x71], &[0x67, 0x44, 0x66, 0x98], &[0x66, 0x8e, 0x33, 0xef],
            &[0x6e, 0x8a, 0x27, 0x8c], &[],
        ];
        bytes[..magics[magic].len()].copy_from_slice(magics[magic]);
        if let Some(Ok(greeting)) = bytes.first_chunk().map(NbdGreeting::decode) {
            prop_assert_eq!(NbdGreeting::decode(&greeting.to_bytes()), Ok(greeting));
        }
        if let Some(Ok(flags)) = bytes.first_chunk().map(|bytes| ClientFlags::decode(*bytes)) {
            prop_assert_eq!(ClientFlags::decode(flags.to_bytes()), Ok(flags));
        }
        if let Some(Ok(option)) = bytes.first_chunk().map(OptionHeader::decode) {
            prop_assert_eq!(OptionHeader::decode(&option.to_bytes()), Ok(option));
        }
        if let Some(Ok(reply)) = bytes.first_chunk().map(OptionReplyHeader::decode) {
            prop_assert_eq!(OptionReplyHeader::decode(&reply.to_bytes()), Ok(reply));
        }
        if let Some(Ok(reply)) = bytes.first_chunk().map(SimpleReply::decode) {
            let mut written = [0; SimpleReply::SIZE];
            reply.encode(&mut written);
            prop_assert_eq!(SimpleReply::decode(&written), Ok(reply));
        }
        for form in [HeaderForm::Compact, HeaderForm::Extended] {
            let mut written = [0; 32];
            if let Ok(request) = RequestHeader::decode(form, &bytes) {
                request.encode(form, &mut written);
                prop_assert_eq!(RequestHeader::decode(form, &written), Ok(request));
            }
            if let Ok(chunk) = ChunkHeader::decode(form, &bytes) {
                chunk.encode(form, &mut written);
                prop_assert_eq!(ChunkHeader::decode(form, &written), Ok(chunk));
            }
            if let Ok(extent) = Extent::decode(form, &bytes) {
                extent.encode(form, &mut written);
                prop_assert_eq!(Extent::decode(form, &written), Ok(extent));
            }
        }
    }

    #[test]
    fn arbitrary_options_are_decoded_or_rejected(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
        let _ = (InfoRequest::decode(&bytes), MetaContextRequest::decode(&bytes));
        if let Ok(info) = Info::decode(&bytes) {
            let mut written = Vec::new();
            info.encode(&mut written);
            prop_assert_eq!(written, bytes);
        }
    }

    #[test]
    fn options_round_trip(
        name in "[^\0]{0,40}",
        kinds in proptest::collection::vec(any::<u16>(), 0..9),
        queries in proptest::collection::vec("[a-z:]{0,20}", 0..9),
    ) {
        let mut bytes = Vec::new();
        InfoRequest::encode(&name, &kinds, &mut bytes);
        let request = InfoRequest::decode(&bytes).expect("an encoded request");
        prop_assert_eq!((request.name, request.kinds().collect::<Vec<_>>()), (name.as_str(), kinds));
        bytes.clear();
        let queries: Vec<&str> = queries.iter().map(String::as_str).collect();
        MetaContextRequest::encode(&name, &queries, &mut bytes);
        let request = MetaContextRequest::decode(&bytes).expect("an encoded request");
        prop_assert_eq!((request.name, request.queries().collect::<Vec<_>>()), (name.as_str(), queries));
        // Cut anywhere, it is rejected.
        bytes.pop();
        prop_assert!(MetaContextRequest::decode(&bytes).is_err());
    }
}
