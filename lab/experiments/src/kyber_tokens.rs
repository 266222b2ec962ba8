//! Averages Kyber's tokens, the number of requests that it admits to the device, from its tracepoint.
//!
//! `kyber:kyber_adjust` is recorded when the number of a kind of request changes. The average is over time and starts
//! at the maximum: 256 tokens for reads, 128 for writes.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read};
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;
use std::time::Instant;

use crate::host::HostInfo;

/// Most tokens for reads and for writes, as in the kernel.
const TOKENS_MAX: [f64; 2] = [256.0, 128.0];
/// Most bytes that [`KyberTokenMeter::collect`] reads at once.
const READ_BYTES_MAX: u64 = 1 << 20;

/// Owns a tracing instance, which is removed on drop.
#[derive(Debug)]
pub(crate) struct KyberTokenMeter {
    instance: PathBuf,
    /// `None` only during drop: an instance with an open pipe cannot be removed.
    pipe: Option<File>,
    current: [f64; 2],
    weighted: [f64; 2],
    began: Instant,
    since: [Instant; 2],
    partial_line: String,
}

impl KyberTokenMeter {
    /// Enables the tracepoint in a new instance.
    ///
    /// # Errors
    /// A kernel without tracefs or Kyber's tracepoint, or missing permission.
    pub(crate) fn start(host: &HostInfo) -> io::Result<KyberTokenMeter> {
        let instance = host.path(&format!("sys/kernel/tracing/instances/ringbolt-{}", std::process::id()));
        match fs::create_dir(&instance) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
            _ => {}
        }
        let open = || {
            fs::write(instance.join("events/kyber/kyber_adjust/enable"), "1")?;
            // O_NONBLOCK: reading must not wait for the next change.
            let flags = rustix::fs::OFlags::NONBLOCK.bits() as i32;
            OpenOptions::new().read(true).custom_flags(flags).open(instance.join("trace_pipe"))
        };
        match open() {
            Ok(pipe) => {
                let current = Instant::now();
                Ok(KyberTokenMeter {
                    instance,
                    pipe: Some(pipe),
                    current: TOKENS_MAX,
                    weighted: [0.0; 2],
                    began: current,
                    since: [current; 2],
                    partial_line: String::new(),
                })
            }
            Err(error) => {
                let _ = fs::remove_dir(&instance);
                Err(error)
            }
        }
    }

    /// Reads the changes since the last call.
    pub(crate) fn collect(&mut self) {
        let mut bytes = Vec::new();
        let mut chunk = [0; 4096];
        while bytes.len() < READ_BYTES_MAX as usize {
            // EAGAIN: the pipe is empty.
            match self.pipe.as_mut().map_or(Ok(0), |pipe| pipe.read(&mut chunk)) {
                Ok(0) | Err(_) => break,
                Ok(length) => bytes.extend_from_slice(&chunk[..length]),
            }
        }
        self.partial_line.push_str(&String::from_utf8_lossy(&bytes));
        while let Some((line, partial_line)) = self.partial_line.split_once('\n') {
            let parse_change = parse_change(line);
            let partial_line = partial_line.to_string();
            if let Some((kind, depth)) = parse_change {
                self.accumulate(kind);
                self.current[kind] = depth;
            }
            self.partial_line = partial_line;
        }
    }

    fn accumulate(&mut self, kind: usize) {
        self.weighted[kind] += self.current[kind] * self.since[kind].elapsed().as_secs_f64();
        self.since[kind] = Instant::now();
    }

    /// Restarts the averages.
    pub(crate) fn reset(&mut self) {
        self.collect();
        let current = Instant::now();
        (self.weighted, self.began, self.since) = ([0.0; 2], current, [current; 2]);
    }

    /// Read and write tokens, averaged over time.
    pub(crate) fn averages(mut self) -> (f64, f64) {
        self.collect();
        self.accumulate(0);
        self.accumulate(1);
        let seconds = self.began.elapsed().as_secs_f64().max(1e-6);
        (self.weighted[0] / seconds, self.weighted[1] / seconds)
    }
}

impl Drop for KyberTokenMeter {
    fn drop(&mut self) {
        self.pipe = None;
        let _ = fs::write(self.instance.join("events/kyber/kyber_adjust/enable"), "0");
        let _ = fs::remove_dir(&self.instance);
    }
}

/// Parses `… kyber_adjust: 259,0 READ 128` to index and tokens.
fn parse_change(line: &str) -> Option<(usize, f64)> {
    let (_, message) = line.split_once("kyber_adjust:")?;
    let mut fields = message.split_whitespace().skip(1);
    let kind = match fields.next()? {
        "READ" => 0,
        "WRITE" => 1,
        _ => return None,
    };
    Some((kind, fields.next()?.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn trace_lines_are_parsed() {
        let line = "  kworker/1:1H-99 [001] .....  123.456: kyber_adjust: 259,0 WRITE 53";
        assert_eq!(parse_change(line), Some((1, 53.0)));
        assert_eq!(parse_change("x: kyber_adjust: 259,0 READ 256"), Some((0, 256.0)));
        for nonsense in [
            "",
            "kyber_adjust:",
            "kyber_adjust: 1,2 DISCARD 3",
            "kyber_latency: 1,2 READ 3",
            "kyber_adjust: 1,2 READ x",
        ] {
            assert_eq!(parse_change(nonsense), None, "{nonsense}");
        }
    }

    #[test]
    fn a_missing_tracepoint_is_an_error() {
        assert!(KyberTokenMeter::start(&HostInfo::with_root("/nowhere")).is_err());
    }
}
