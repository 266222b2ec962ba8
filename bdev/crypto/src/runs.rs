//! Whole blocks of data that is in slices of any length, or in memory of a peer.

use dma::Data;

/// Bytes of memory of a peer that are copied, changed and copied back at a time, if a block is not larger.
const STEP_BYTES: usize = 4096;

/// Calls `run` with runs of whole blocks that together are all of `data`, in order, each with the number of
/// its first block. Blocks that are in several slices, or in memory that a peer may write, are copied to
/// `scratch` for the call and copied back.
///
/// # Panics
/// If the data is not whole blocks, or a slice is read-only.
pub(crate) fn for_each_run(
    data: &mut Data,
    block_bytes: usize,
    scratch: &mut Vec<u8>,
    mut run: impl FnMut(u64, &mut [u8]),
) {
    let total = data.len();
    assert!(total.is_multiple_of(block_bytes), "{total} bytes in blocks of {block_bytes}");
    let mut offset = 0;
    while offset < total {
        let Some((slice, at)) = data.slice_at_mut(offset) else { return };
        let whole = (slice.len() - at) / block_bytes * block_bytes;
        let first = (offset / block_bytes) as u64;
        if whole > 0 && !slice.is_external() {
            run(first, &mut slice.as_mut_slice()[at..at + whole]);
            offset += whole;
            continue;
        }
        let step = (STEP_BYTES / block_bytes).max(1) * block_bytes;
        let step = if whole > 0 { step.min(whole) } else { block_bytes };
        scratch.resize(step, 0);
        data.copy_to(offset, scratch);
        run(first, scratch);
        data.copy_from(offset, scratch);
        offset += step;
    }
}

/// Copies all of `from` to `to`, which is as long and of memory of its own.
pub(crate) fn copy(to: &mut Data, from: &Data) {
    let mut offset = 0;
    for slice in to.slices_mut() {
        from.copy_to(offset, slice.as_mut_slice());
        offset += slice.len();
    }
}

#[cfg(test)]
mod tests {
    use dma::{Arena, ArenaConfig, Pool};

    use super::*;

    #[test]
    fn every_block_is_in_one_run_whatever_the_slices() {
        let arena =
            Arena::new(ArenaConfig { limit_bytes: 64 << 20, hugepages: false, ..ArenaConfig::default() });
        let pool = Pool::new(&arena);
        for (block, slices) in [
            (512, vec![16_384]),
            (512, vec![512, 1024, 14_848]),
            (512, vec![1, 510, 2, 487, 4000, 11_384]),
            (4096, vec![100, 100, 7991, 8193]),
            (16, vec![7, 1, 1, 4087, 12_288]),
        ] {
            let total: usize = slices.iter().sum();
            // Each an allocation of its own, so that they are not joined.
            let buffers = slices.iter().map(|bytes| pool.take(*bytes).unwrap()).collect();
            let mut data = Data::gather(buffers).unwrap();
            assert_eq!((total, data.slices().len()), (16_384, slices.len()));
            data.copy_from(0, &(0..total).map(|at| at as u8).collect::<Vec<_>>());
            let (mut next, mut scratch) = (0, Vec::new());
            for_each_run(&mut data, block, &mut scratch, |first, run| {
                assert_eq!((first, run.len() % block), (next, 0));
                next += (run.len() / block) as u64;
                run.iter_mut().enumerate().for_each(|(at, byte)| {
                    assert_eq!(*byte, (first as usize * block + at) as u8);
                    *byte ^= 0xff;
                });
            });
            assert_eq!(next as usize, total / block);
            let mut after = vec![0; total];
            data.copy_to(0, &mut after);
            assert!(after.iter().enumerate().all(|(at, byte)| *byte == !(at as u8)), "{block} {slices:?}");
            let mut other = Data::from(pool.take(total).unwrap());
            copy(&mut other, &data);
            let mut copied = vec![0; total];
            other.copy_to(0, &mut copied);
            assert_eq!(copied, after);
        }
    }
}
