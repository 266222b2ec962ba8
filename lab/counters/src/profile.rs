//! Sampling where the processors are.

use std::collections::BTreeMap;
use std::io;
use std::path::Path;

use sys::{PerfConfig, PerfEvent, PerfKind, PerfTarget, Samples};

use crate::classes::Classes;
use crate::symbols::Symbols;

/// Samples a second on each processor: not a divisor of anything periodic, as perf's users do.
const FREQUENCY_HZ: u64 = 997;
/// Pages of each ring: two seconds of deep call chains.
const PAGES: usize = 128;
/// `PERF_RECORD_SAMPLE`.
const RECORD_SAMPLE: u32 = 9;
/// Call chains mark where they change from kernel to user with addresses from here on.
const CONTEXT_MAX: u64 = (-4095_i64) as u64;
/// How far a call chain is followed.
const DEPTH_MAX: usize = 64;

/// Where time went, by class.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Shares {
    /// Samples by class.
    pub samples: BTreeMap<String, u64>,
    /// What was sampled: `cycles`, or `time` where there are none.
    pub by: String,
}

impl Shares {
    /// All samples.
    pub fn all(&self) -> u64 {
        self.samples.values().sum()
    }

    /// A class's share in percent; of all that was not idle, if `busy`.
    pub fn percent(&self, class: &str, busy: bool) -> f64 {
        let idle = self.samples.get("idle").copied().unwrap_or(0);
        let whole = if busy { self.all() - idle } else { self.all() };
        let part = self.samples.get(class).copied().unwrap_or(0);
        if whole == 0 { 0.0 } else { part as f64 * 100.0 / whole as f64 }
    }
}

/// Samples all processors until it is dropped.
#[derive(Debug)]
pub struct Profile {
    rings: Vec<Samples>,
    symbols: Symbols,
    classes: Classes,
    shares: Shares,
}

impl Profile {
    /// Begins on these processors: by cycles where they are counted, by time otherwise.
    ///
    /// # Errors
    /// What the kernel says, or that its symbols cannot be seen.
    pub fn begin(cpus: &[u32], classes: Classes) -> io::Result<Profile> {
        let symbols = Symbols::read(Path::new("/proc/kallsyms"));
        if symbols.is_empty() {
            return Err(io::Error::other("the kernel hides its symbols (sysctl kernel.kptr_restrict)"));
        }
        // Cycles of the processor; the kernel's clock.
        let kinds = [(PerfKind::Hardware(0), "cycles"), (PerfKind::Software(0), "time")];
        let mut last = io::Error::other("no processor is named");
        for (kind, by) in kinds {
            match cpus.iter().map(|cpu| ring(*cpu, kind)).collect::<io::Result<Vec<_>>>() {
                Ok(rings) if !rings.is_empty() => {
                    let shares = Shares { by: by.to_string(), ..Shares::default() };
                    let profile = Profile { rings, symbols, classes, shares };
                    for ring in &profile.rings {
                        ring.event().switch(true)?;
                    }
                    return Ok(profile);
                }
                Ok(_) => {}
                Err(error) => last = error,
            }
        }
        Err(last)
    }

    /// Takes samples out of the rings, which must not run over: call it a few times a second.
    pub fn collect(&mut self) {
        for ring in &mut self.rings {
            ring.drain(&mut |record| {
                if let Some(class) = classify(record, &self.symbols, &self.classes) {
                    *self.shares.samples.entry(class.to_string()).or_default() += 1;
                }
            });
        }
    }

    /// Forgets what was sampled so far.
    pub fn restart(&mut self) {
        self.collect();
        self.shares.samples.clear();
    }

    /// Ends, with what was sampled.
    pub fn finish(mut self) -> Shares {
        for ring in &self.rings {
            // An event that cannot be switched off ends with its number, below.
            let _ = ring.event().switch(false);
        }
        self.collect();
        self.shares
    }
}

fn ring(cpu: u32, kind: PerfKind) -> io::Result<Samples> {
    let config =
        PerfConfig { kind, target: PerfTarget::Cpu(cpu), user_only: false, frequency_hz: FREQUENCY_HZ };
    Samples::of(PerfEvent::open(&config, None)?, PAGES)
}

/// The class of a record; none where it is no sample. Layout: header, address, process, thread, length
/// of the chain, chain.
fn classify<'a>(record: &[u8], symbols: &Symbols, classes: &'a Classes) -> Option<&'a str> {
    let word = |at: usize| record.get(at..at + 8).map(|b| u64::from_ne_bytes(std::array::from_fn(|i| b[i])));
    let half = |at: usize| record.get(at..at + 4).map(|b| u32::from_ne_bytes(std::array::from_fn(|i| b[i])));
    if half(0)? != RECORD_SAMPLE {
        return None;
    }
    let mode = half(4)? & 0xffff & 7;
    // PERF_RECORD_MISC_USER is 2.
    let user = mode == 2;
    let process = half(16)?;
    let length = usize::try_from(word(24)?).ok()?;
    let mut functions: Vec<&str> = Vec::new();
    let chain = (0..length.min(DEPTH_MAX)).map_while(|at| word(32 + at * 8));
    let addresses: Vec<u64> = chain.filter(|address| *address < CONTEXT_MAX).collect();
    let addresses = if addresses.is_empty() { vec![word(8)?] } else { addresses };
    if !user {
        functions.extend(addresses.iter().filter_map(|address| symbols.at(*address)));
    }
    // The idle task is process 0, whatever it does in the kernel's idle loop.
    let class = classes.of(&functions, user);
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
    fn samples_are_classified_by_their_chain() {
        let symbols = Symbols::parse(
            "ffffffff81000000 T blk_mq_submit_bio\nffffffff82000000 T memcpy\nffffffff83000000 T io_read\n",
        );
        let classes = Classes::built_in();
        let of = |record: &[u8]| classify(record, &symbols, &classes);
        let marker = (-128_i64) as u64;
        assert_eq!(of(&sample(false, 9, &[marker, 0xffff_ffff_8100_0010])), Some("block_layer"));
        assert_eq!(
            of(&sample(false, 9, &[marker, 0xffff_ffff_8200_0010, 0xffff_ffff_8300_0000])),
            Some("io_library")
        );
        assert_eq!(of(&sample(false, 9, &[0xffff_ffff_8200_0010])), Some("kernel"));
        assert_eq!(of(&sample(false, 0, &[0xffff_ffff_8200_0010])), Some("idle"));
        assert_eq!(of(&sample(true, 9, &[0x5555_0000])), Some("generator"));
        let whole = sample(false, 9, &[marker, 0xffff_ffff_8100_0010]);
        for length in 0..whole.len() {
            // A record that was cut off is no panic.
            let _ = of(&whole[..length]);
        }
        let mut lost = whole;
        lost[0] = 2;
        assert_eq!(of(&lost), None);
    }

    #[test]
    fn shares_are_of_what_was_not_idle() {
        let samples =
            [("idle".to_string(), 50), ("locks".to_string(), 25), ("kernel".to_string(), 25)].into();
        let shares = Shares { samples, by: "time".into() };
        assert_eq!((shares.percent("locks", true), shares.percent("locks", false)), (50.0, 25.0));
        assert_eq!(Shares::default().percent("locks", true), 0.0);
    }

    #[test]
    fn a_busy_processor_is_seen() {
        let cpus: Vec<u32> = (0..std::thread::available_parallelism().unwrap().get() as u32).collect();
        let mut profile = match Profile::begin(&cpus, Classes::built_in()) {
            Ok(profile) => profile,
            Err(error) => {
                eprintln!("SKIPPED: sampling is not allowed here: {error}");
                return;
            }
        };
        let began = std::time::Instant::now();
        let mut sum = 0u64;
        while began.elapsed().as_millis() < 300 {
            sum = std::hint::black_box(sum.wrapping_mul(3) + 1);
        }
        profile.collect();
        let shares = profile.finish();
        assert!(shares.all() > 50, "{shares:?}");
        assert!(shares.samples.get("generator").copied().unwrap_or(0) > 20, "{shares:?}");
    }
}
