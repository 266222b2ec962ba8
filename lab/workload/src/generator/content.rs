//! Content of writes that deduplicate or compress to a given share.

use crate::WyRand;
use crate::spec::{JobSpec, ReducibleContent};

/// What the seeds of the working set that all jobs share begin with.
const GLOBAL_SEED: u64 = 0x6465_6475_7065;

/// Draws the content of each write: a seed, new or repeated, from which the block follows.
#[derive(Debug)]
pub(super) struct ReducibleWriter {
    content: ReducibleContent,
    random: WyRand,
    /// Seeds of the working set are this and a number below `set_size`; 0 without a set.
    set_seed: u64,
    set_size: u64,
    /// Of the last unique write.
    last: u64,
}

impl ReducibleWriter {
    /// `region_bytes` is the size of the job's region.
    pub(super) fn new(content: &ReducibleContent, spec: &JobSpec, region_bytes: u64) -> ReducibleWriter {
        let blocks = region_bytes / u64::from(spec.block_bytes.max(1));
        let set_size = match content.working_set_percent {
            Some(percent) => (blocks * u64::from(percent) / 100).max(1),
            None => 0,
        };
        let set_seed = if content.global { GLOBAL_SEED } else { spec.seed ^ GLOBAL_SEED };
        let random = WyRand::new(spec.seed ^ 0x7265_6475_6365);
        ReducibleWriter { content: content.clone(), random, set_seed, set_size, last: spec.seed }
    }

    /// Fills the buffer of the next write.
    pub(super) fn fill(&mut self, data: &mut [u8]) {
        let repeats = self.random.below(100) < u64::from(self.content.dedupe_percent);
        let seed = match (repeats, self.set_size) {
            (true, 0) => self.last,
            (true, size) => WyRand::new(self.set_seed.wrapping_add(self.random.below(size))).next_bits(),
            (false, _) => self.random.next_bits(),
        };
        self.last = seed;
        let mut random = WyRand::new(seed);
        let chunk = match self.content.chunk_bytes {
            0 => data.len(),
            bytes => bytes as usize,
        };
        for chunk in data.chunks_mut(chunk.max(1)) {
            let noise = chunk.len() * (100 - usize::from(self.content.compress_percent)) / 100;
            let (noise, rest) = chunk.split_at_mut(noise);
            for word in noise.chunks_mut(8) {
                word.copy_from_slice(&random.next_bits().to_le_bytes()[..word.len()]);
            }
            match self.content.pattern.as_slice() {
                [] => rest.fill(0),
                pattern => rest.iter_mut().zip(pattern.iter().cycle()).for_each(|(to, from)| *to = *from),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashMap;

    fn blocks(content: ReducibleContent, seed: u64, count: usize) -> Vec<Vec<u8>> {
        let spec = JobSpec { seed, ..JobSpec::default() };
        let mut writer = ReducibleWriter::new(&content, &spec, 4096 * 1000);
        let mut block = vec![0; 4096];
        let mut fill = || {
            writer.fill(&mut block);
            block.clone()
        };
        (0..count).map(|_| fill()).collect()
    }

    const CONTENT: ReducibleContent = ReducibleContent {
        dedupe_percent: 50,
        working_set_percent: None,
        global: false,
        compress_percent: 0,
        chunk_bytes: 512,
        pattern: Vec::new(),
    };

    #[test]
    fn half_of_the_writes_repeat() {
        let written = blocks(CONTENT, 1, 2000);
        let unique: std::collections::HashSet<&Vec<u8>> = written.iter().collect();
        assert!((900..1100).contains(&unique.len()), "{} of 2000", unique.len());
    }

    #[test]
    fn jobs_share_the_global_working_set() {
        let content = ReducibleContent { working_set_percent: Some(2), global: true, ..CONTENT };
        let written = [blocks(content.clone(), 1, 1000), blocks(content, 2, 1000)].concat();
        let mut counts: HashMap<&Vec<u8>, u32> = HashMap::new();
        written.iter().for_each(|block| *counts.entry(block).or_default() += 1);
        // 2 % of 1000 blocks, each written about 50 times.
        let repeated: Vec<u32> = counts.values().copied().filter(|count| *count > 1).collect();
        assert_eq!(repeated.len(), 20, "{repeated:?}");
        assert!(repeated.iter().all(|count| (20..90).contains(count)), "{repeated:?}");
    }

    #[test]
    fn a_share_of_each_chunk_is_not_random() {
        let content = ReducibleContent { compress_percent: 75, pattern: vec![0xab, 0xcd], ..CONTENT };
        let block = &blocks(content, 1, 1)[0];
        for chunk in block.chunks(512) {
            assert_eq!(chunk[128..132], [0xab, 0xcd, 0xab, 0xcd]);
            assert!(chunk[..128].iter().filter(|byte| **byte == 0xab).count() < 10);
        }
    }
}
