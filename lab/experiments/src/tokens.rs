//! How many requests Kyber lets into the device: its tokens, as its tracepoint tells them.
//!
//! `kyber:kyber_adjust` is recorded whenever the number for a kind of request changes. What is wanted is
//! the average over time, from the most that there can be: 256 for reads and 128 for writes.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read};
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;
use std::time::Instant;

use crate::host::Host;

/// The most tokens of reads and of writes, as in the kernel.
const MOST: [f64; 2] = [256.0, 128.0];
/// Most bytes that one look takes over.
const LOOK_BYTES_MAX: u64 = 1 << 20;

/// Watches a tracing instance of its own, which goes when this is dropped.
#[derive(Debug)]
pub(crate) struct Tokens {
    instance: PathBuf,
    /// None only while it is dropped: an instance whose pipe is open cannot be removed.
    pipe: Option<File>,
    now: [f64; 2],
    weighted: [f64; 2],
    began: Instant,
    since: [Instant; 2],
    rest: String,
}

impl Tokens {
    /// Begins to watch.
    ///
    /// # Errors
    /// A kernel without tracefs or without Kyber's tracepoint, or a user who may not.
    pub(crate) fn begin(host: &Host) -> io::Result<Tokens> {
        let instance = host.path(&format!("sys/kernel/tracing/instances/ringbolt-{}", std::process::id()));
        match fs::create_dir(&instance) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
            _ => {}
        }
        let open = || {
            fs::write(instance.join("events/kyber/kyber_adjust/enable"), "1")?;
            // O_NONBLOCK: a look must not wait for the next change.
            let flags = rustix::fs::OFlags::NONBLOCK.bits() as i32;
            OpenOptions::new().read(true).custom_flags(flags).open(instance.join("trace_pipe"))
        };
        match open() {
            Ok(pipe) => {
                let now = Instant::now();
                Ok(Tokens {
                    instance,
                    pipe: Some(pipe),
                    now: MOST,
                    weighted: [0.0; 2],
                    began: now,
                    since: [now; 2],
                    rest: String::new(),
                })
            }
            Err(error) => {
                let _ = fs::remove_dir(&instance);
                Err(error)
            }
        }
    }

    /// Takes over the changes since the last look.
    pub(crate) fn collect(&mut self) {
        let mut bytes = Vec::new();
        let mut chunk = [0; 4096];
        while bytes.len() < LOOK_BYTES_MAX as usize {
            // EAGAIN: that is all.
            match self.pipe.as_mut().map_or(Ok(0), |pipe| pipe.read(&mut chunk)) {
                Ok(0) | Err(_) => break,
                Ok(length) => bytes.extend_from_slice(&chunk[..length]),
            }
        }
        self.rest.push_str(&String::from_utf8_lossy(&bytes));
        while let Some((line, rest)) = self.rest.split_once('\n') {
            let change = change(line);
            let rest = rest.to_string();
            if let Some((kind, depth)) = change {
                self.settle(kind);
                self.now[kind] = depth;
            }
            self.rest = rest;
        }
    }

    fn settle(&mut self, kind: usize) {
        self.weighted[kind] += self.now[kind] * self.since[kind].elapsed().as_secs_f64();
        self.since[kind] = Instant::now();
    }

    /// Averages from now on.
    pub(crate) fn restart(&mut self) {
        self.collect();
        let now = Instant::now();
        (self.weighted, self.began, self.since) = ([0.0; 2], now, [now; 2]);
    }

    /// Read and write tokens, averaged over time.
    pub(crate) fn averages(mut self) -> (f64, f64) {
        self.collect();
        self.settle(0);
        self.settle(1);
        let seconds = self.began.elapsed().as_secs_f64().max(1e-6);
        (self.weighted[0] / seconds, self.weighted[1] / seconds)
    }
}

impl Drop for Tokens {
    fn drop(&mut self) {
        self.pipe = None;
        let _ = fs::write(self.instance.join("events/kyber/kyber_adjust/enable"), "0");
        let _ = fs::remove_dir(&self.instance);
    }
}

/// The kind and the number of `… kyber_adjust: 259,0 READ 128`.
fn change(line: &str) -> Option<(usize, f64)> {
    let (_, said) = line.split_once("kyber_adjust:")?;
    let mut words = said.split_whitespace().skip(1);
    let kind = match words.next()? {
        "READ" => 0,
        "WRITE" => 1,
        _ => return None,
    };
    Some((kind, words.next()?.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn changes_are_read_from_the_trace() {
        let line = "  kworker/1:1H-99 [001] .....  123.456: kyber_adjust: 259,0 WRITE 53";
        assert_eq!(change(line), Some((1, 53.0)));
        assert_eq!(change("x: kyber_adjust: 259,0 READ 256"), Some((0, 256.0)));
        for nonsense in [
            "",
            "kyber_adjust:",
            "kyber_adjust: 1,2 DISCARD 3",
            "kyber_latency: 1,2 READ 3",
            "kyber_adjust: 1,2 READ x",
        ] {
            assert_eq!(change(nonsense), None, "{nonsense}");
        }
    }

    #[test]
    fn without_the_tracepoint_the_reason_is_given() {
        assert!(Tokens::begin(&Host::at("/nowhere")).is_err());
    }
}
