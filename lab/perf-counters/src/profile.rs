//! A sampling CPU profiler.

use std::collections::BTreeMap;
use std::io;
use std::path::Path;

use os::{PerfConfig, PerfEvent, PerfKind, PerfTarget, SampleRing};

use crate::classes::SymbolClasses;
use crate::symbols::KernelSymbols;

/// Samples per second and CPU: a prime, so that samples do not align with periodic activity.
const FREQUENCY_HZ: u64 = 997;
/// Pages of each ring buffer: two seconds of deep call chains.
const PAGES: usize = 128;
/// `PERF_RECORD_SAMPLE`.
const RECORD_SAMPLE: u32 = 9;
/// Addresses from here on are markers in a call chain, for a change between kernel and user mode.
const CONTEXT_MAX: u64 = (-4095_i64) as u64;
/// Maximum number of call chain entries that are evaluated.
const DEPTH_MAX: usize = 64;

/// Distribution of samples by class.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ProfileShares {
    /// Number of samples by class.
    pub samples: BTreeMap<String, u64>,
    /// Sampling event: `cycles`, or `time` if the machine has no cycle counter.
    pub sampled_by: String,
}

impl ProfileShares {
    /// Number of all samples.
    pub fn total(&self) -> u64 {
        self.samples.values().sum()
    }

    /// Share of a class in percent, of all samples or, if `busy`, of the non-idle ones.
    pub fn percent(&self, class: &str, busy: bool) -> f64 {
        let idle = self.samples.get("idle").copied().unwrap_or(0);
        let whole = if busy { self.total() - idle } else { self.total() };
        let part = self.samples.get(class).copied().unwrap_or(0);
        if whole == 0 { 0.0 } else { part as f64 * 100.0 / whole as f64 }
    }
}

/// Samples the call chains of all CPUs until it is dropped.
///
/// [`start`](Self::start) opens one sampling event and one ring buffer per CPU. [`collect`](Self::collect)
/// drains the buffers and classifies the samples, and [`stop`](Self::stop) returns the totals.
#[derive(Debug)]
pub struct CpuProfiler {
    rings: Vec<SampleRing>,
    symbols: KernelSymbols,
    classes: SymbolClasses,
    shares: ProfileShares,
}

impl CpuProfiler {
    /// Starts sampling on these CPUs: by cycles if they can be counted, otherwise by time.
    ///
    /// # Errors
    /// A failed system call, or kernel symbols that are hidden.
    pub fn start(cpus: &[u32], classes: SymbolClasses) -> io::Result<CpuProfiler> {
        let symbols = KernelSymbols::read(Path::new("/proc/kallsyms"));
        if symbols.is_empty() {
            return Err(io::Error::other("the kernel hides its symbols (sysctl kernel.kptr_restrict)"));
        }
        // CPU cycles; the kernel's CPU clock.
        let kinds = [(PerfKind::Hardware(0), "cycles"), (PerfKind::Software(0), "time")];
        let mut last_error = io::Error::other("no CPU is specified");
        for (kind, by) in kinds {
            match cpus.iter().map(|cpu| open_ring(*cpu, kind)).collect::<io::Result<Vec<_>>>() {
                Ok(rings) if !rings.is_empty() => {
                    let shares = ProfileShares { sampled_by: by.to_string(), ..ProfileShares::default() };
                    let profile = CpuProfiler { rings, symbols, classes, shares };
                    for ring in &profile.rings {
                        ring.event().set_enabled(true)?;
                    }
                    return Ok(profile);
                }
                Ok(_) => {}
                Err(error) => last_error = error,
            }
        }
        Err(last_error)
    }

    /// Drains the ring buffers. Call it a few times per second, before they overflow.
    pub fn collect(&mut self) {
        for ring in &mut self.rings {
            ring.drain(&mut |record| {
                if let Some(class) = classify_record(record, &self.symbols, &self.classes) {
                    *self.shares.samples.entry(class.to_string()).or_default() += 1;
                }
            });
        }
    }

    /// Discards all samples so far.
    pub fn reset(&mut self) {
        self.collect();
        self.shares.samples.clear();
    }

    /// Stops sampling and returns the totals.
    pub fn stop(mut self) -> ProfileShares {
        for ring in &self.rings {
            // An event that cannot be disabled ends when its descriptor is closed, below.
            let _ = ring.event().set_enabled(false);
        }
        self.collect();
        self.shares
    }
}

fn open_ring(cpu: u32, kind: PerfKind) -> io::Result<SampleRing> {
    let config =
        PerfConfig { kind, target: PerfTarget::Cpu(cpu), user_only: false, frequency_hz: FREQUENCY_HZ };
    SampleRing::new(PerfEvent::open(&config, None)?, PAGES)
}

/// The class of a record; `None` if it is not a sample. Layout: header, address, process, thread, chain
/// length, chain.
fn classify_record<'a>(
    record: &[u8],
    symbols: &KernelSymbols,
    classes: &'a SymbolClasses,
) -> Option<&'a str> {
    let u64_at =
        |at: usize| record.get(at..at + 8).map(|b| u64::from_ne_bytes(std::array::from_fn(|i| b[i])));
    let u32_at =
        |at: usize| record.get(at..at + 4).map(|b| u32::from_ne_bytes(std::array::from_fn(|i| b[i])));
    if u32_at(0)? != RECORD_SAMPLE {
        return None;
    }
    let mode = u32_at(4)? & 0xffff & 7;
    // PERF_RECORD_MISC_USER is 2.
    let user = mode == 2;
    let process = u32_at(16)?;
    let length = usize::try_from(u64_at(24)?).ok()?;
    let mut functions: Vec<&str> = Vec::new();
    let chain = (0..length.min(DEPTH_MAX)).map_while(|at| u64_at(32 + at * 8));
    let addresses: Vec<u64> = chain.filter(|address| *address < CONTEXT_MAX).collect();
    let addresses = if addresses.is_empty() { vec![u64_at(8)?] } else { addresses };
    if !user {
        functions.extend(addresses.iter().filter_map(|address| symbols.function_at(*address)));
    }
    // The idle task is process 0, whatever function of the idle loop it is in.
    let class = classes.classify(&functions, user);
    Some(if process == 0 && class == "kernel" { "idle" } else { class })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(user: bool, process: u32, chain: &[u64]) -> Vec<u8> {
        let mut record = Vec::new();
        record.extend(RECORD_SAMPLE.to_ne_bytes());
        record.extend((if user { 2u16 } else { 1 }).to_ne_bytes());
        record.extend((32 + chain.len() as u16 * 8).to_ne_bytes());
        record.extend(chain.first().copied().unwrap_or(0).to_ne_bytes());
        record.extend(process.to_ne_bytes());
        record.extend(process.to_ne_bytes());
        record.extend((chain.len() as u64).to_ne_bytes());
        chain.iter().for_each(|address| record.extend(address.to_ne_bytes()));
        record
    }

    #[test]
    fn samples_are_classified_by_call_chain() {
        let symbols = KernelSymbols::parse(
            "ffffffff81000000 T blk_mq_submit_bio\nffffffff82000000 T memcpy\nffffffff83000000 T io_read\n",
        );
        let classes = SymbolClasses::built_in();
        let class_of = |record: &[u8]| classify_record(record, &symbols, &classes);
        let marker = (-128_i64) as u64;
        assert_eq!(class_of(&sample(false, 9, &[marker, 0xffff_ffff_8100_0010])), Some("block_layer"));
        assert_eq!(
            class_of(&sample(false, 9, &[marker, 0xffff_ffff_8200_0010, 0xffff_ffff_8300_0000])),
            Some("io_library")
        );
        assert_eq!(class_of(&sample(false, 9, &[0xffff_ffff_8200_0010])), Some("kernel"));
        assert_eq!(class_of(&sample(false, 0, &[0xffff_ffff_8200_0010])), Some("idle"));
        assert_eq!(class_of(&sample(true, 9, &[0x5555_0000])), Some("generator"));
        let whole = sample(false, 9, &[marker, 0xffff_ffff_8100_0010]);
        for length in 0..whole.len() {
            // A truncated record must not panic.
            let _ = class_of(&whole[..length]);
        }
        let mut lost = whole;
        lost[0] = 2;
        assert_eq!(class_of(&lost), None);
    }

    #[test]
    fn busy_shares_exclude_idle_samples() {
        let samples =
            [("idle".to_string(), 50), ("locks".to_string(), 25), ("kernel".to_string(), 25)].into();
        let shares = ProfileShares { samples, sampled_by: "time".into() };
        assert_eq!((shares.percent("locks", true), shares.percent("locks", false)), (50.0, 25.0));
        assert_eq!(ProfileShares::default().percent("locks", true), 0.0);
    }

    #[test]
    fn a_busy_loop_appears_in_the_profile() {
        let cpus: Vec<u32> = (0..std::thread::available_parallelism().unwrap().get() as u32).collect();
        let mut profile = match CpuProfiler::start(&cpus, SymbolClasses::built_in()) {
            Ok(profile) => profile,
            Err(error) => {
                eprintln!("SKIPPED: sampling is not allowed here: {error}");
                return;
            }
        };
        let start = std::time::Instant::now();
        let mut sum = 0u64;
        while start.elapsed().as_millis() < 300 {
            sum = std::hint::black_box(sum.wrapping_mul(3) + 1);
        }
        profile.collect();
        let shares = profile.stop();
        assert!(shares.total() > 50, "{shares:?}");
        assert!(shares.samples.get("generator").copied().unwrap_or(0) > 20, "{shares:?}");
    }
}
