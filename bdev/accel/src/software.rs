//! What the CPU executes and no other crate has.

/// Bytes that are combined at a time: a run of which all sources stay in the innermost cache.
const RUN: usize = 4096;

/// The exclusive or of all sources.
///
/// # Panics
/// If there is no source, or one is not as long as `to`.
pub(crate) fn xor(to: &mut [u8], sources: &[&[u8]]) {
    let Some((first, others)) = sources.split_first() else { panic!("the exclusive or of no source") };
    let length = to.len();
    assert!(sources.iter().all(|source| source.len() == length), "sources of {length} bytes");
    for (index, to) in to.chunks_mut(RUN).enumerate() {
        let part = |source: &[u8]| index * RUN..(index * RUN + RUN).min(source.len());
        to.copy_from_slice(&first[part(first)]);
        for source in others {
            to.iter_mut().zip(&source[part(source)]).for_each(|(to, byte)| *to ^= byte);
        }
    }
}

/// Copies blocks, each followed by `metadata_bytes` zeroes.
///
/// # Panics
/// If the numbers of blocks differ.
pub(crate) fn insert_metadata(to: &mut [u8], from: &[u8], data_bytes: usize, metadata_bytes: usize) {
    let (blocks, rest) = (from.len() / data_bytes, from.len() % data_bytes);
    assert!(rest == 0 && to.len() == blocks * (data_bytes + metadata_bytes), "as many blocks to as from");
    for (to, from) in to.chunks_exact_mut(data_bytes + metadata_bytes).zip(from.chunks_exact(data_bytes)) {
        let (data, metadata) = to.split_at_mut(data_bytes);
        data.copy_from_slice(from);
        metadata.fill(0);
    }
}

/// Copies blocks without the `metadata_bytes` after each.
///
/// # Panics
/// If the numbers of blocks differ.
pub(crate) fn strip_metadata(to: &mut [u8], from: &[u8], data_bytes: usize, metadata_bytes: usize) {
    let (blocks, rest) = (to.len() / data_bytes, to.len() % data_bytes);
    assert!(rest == 0 && from.len() == blocks * (data_bytes + metadata_bytes), "as many blocks to as from");
    for (to, from) in to.chunks_exact_mut(data_bytes).zip(from.chunks_exact(data_bytes + metadata_bytes)) {
        to.copy_from_slice(&from[..data_bytes]);
    }
}
