//! Every decoder of NBD with arbitrary bytes. Decoded values round-trip.
#![no_main]

use libfuzzer_sys::fuzz_target;
use wire_nbd::{
    ChunkHeader, ClientFlags, ErrorChunk, ExportReply, Extent, NbdGreeting, HeaderForm, Info, InfoRequest,
    MetaContextRequest, OptionHeader, OptionReplyHeader, RequestHeader, SimpleReply,
};

fn round_trip<const N: usize, T: PartialEq + std::fmt::Debug>(
    bytes: &[u8],
    decode: impl Fn(&[u8; N]) -> Option<T>,
    encode: impl Fn(&T) -> [u8; N],
) {
    let Some(decoded) = bytes.first_chunk().and_then(&decode) else { return };
    assert_eq!(decode(&encode(&decoded)), Some(decoded));
}

fuzz_target!(|bytes: &[u8]| {
    round_trip(bytes, |from| NbdGreeting::decode(from).ok(), |value| value.to_bytes());
    round_trip(bytes, |from| ClientFlags::decode(*from).ok(), |value| value.to_bytes());
    round_trip(bytes, |from| ExportReply::decode(from).ok(), |value| value.to_bytes());
    round_trip(bytes, |from| OptionHeader::decode(from).ok(), |value| value.to_bytes());
    round_trip(bytes, |from| OptionReplyHeader::decode(from).ok(), |value| value.to_bytes());
    let mut out = [0; 32];
    if let Some(Ok(reply)) = bytes.first_chunk().map(SimpleReply::decode) {
        reply.encode(&mut out);
        assert_eq!(out.first_chunk().map(SimpleReply::decode), Some(Ok(reply)));
    }
    if let Some(Ok(error)) = bytes.first_chunk().map(ErrorChunk::decode) {
        error.encode(&mut out);
        assert_eq!(out.first_chunk().map(ErrorChunk::decode), Some(Ok(error)));
    }
    for form in [HeaderForm::Compact, HeaderForm::Extended] {
        if let Ok(request) = RequestHeader::decode(form, bytes) {
            request.encode(form, &mut out);
            assert_eq!(RequestHeader::decode(form, &out), Ok(request));
        }
        if let Ok(chunk) = ChunkHeader::decode(form, bytes) {
            chunk.encode(form, &mut out);
            assert_eq!(ChunkHeader::decode(form, &out), Ok(chunk));
        }
        if let Ok(extent) = Extent::decode(form, bytes) {
            extent.encode(form, &mut out);
            assert_eq!(Extent::decode(form, &out), Ok(extent));
        }
    }
    let mut written = Vec::new();
    if let Ok(info) = Info::decode(bytes) {
        info.encode(&mut written);
        assert_eq!(written, bytes);
    }
    if let Ok(request) = InfoRequest::decode(bytes) {
        written.clear();
        InfoRequest::encode(request.name, &request.kinds().collect::<Vec<_>>(), &mut written);
        assert_eq!(written, bytes);
    }
    if let Ok(request) = MetaContextRequest::decode(bytes) {
        let queries: Vec<&str> = request.queries().collect();
        assert_eq!(queries.len(), request.count as usize);
        written.clear();
        MetaContextRequest::encode(request.name, &queries, &mut written);
        assert_eq!(written, bytes);
    }
});
