//! Comparison with SPDK's target, where an SPDK was built: SPDK's load generator reads from either target in turn.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, ensure};

use super::load::{BenchDevice, IoPattern, RemoteLoad};
use super::metric::BenchMetric;
use super::process::{ChildProcess, describe};
use super::server::{TargetNamespaces, TargetServer};
use super::{Measurement, RunContext, placement};

const RUN_MAX: Duration = Duration::from_secs(60);
/// Memory of each of SPDK's programs, in MiB.
const MEMORY_MIB: &str = "1024";
/// Hugepages of 2 MiB that both programs need.
const HUGEPAGES_MIN: u64 = 1024;

/// The programs of an SPDK.
pub(super) struct SpdkPrograms {
    pub(super) target: PathBuf,
    perf: PathBuf,
    /// Without hugepages SPDK's programs use ordinary pages. DPDK has them in a memory file, so that vfio-user works.
    hugepages: bool,
}

impl SpdkPrograms {
    /// Finds them in the directory in which SPDK was built.
    pub(super) fn find(directory: &Path) -> anyhow::Result<SpdkPrograms> {
        let program = |name: &str| {
            let path = directory.join("build/bin").join(name);
            ensure!(path.is_file(), "--spdk={}: no {}", directory.display(), path.display());
            Ok(path)
        };
        let meminfo = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
        let free = meminfo.lines().find_map(|line| line.strip_prefix("HugePages_Free:"));
        let free: u64 = free.and_then(|free| free.trim().parse().ok()).unwrap_or(0);
        let hugepages = free >= HUGEPAGES_MIN;
        if !hugepages {
            eprintln!("--spdk: {free} of {HUGEPAGES_MIN} hugepages are free: SPDK runs with --no-huge");
        }
        Ok(SpdkPrograms { target: program("spdk_tgt")?, perf: program("spdk_nvme_perf")?, hugepages })
    }

    /// Options of both programs about memory.
    pub(super) fn memory_options(&self) -> Vec<&'static str> {
        let no_huge = (!self.hugepages).then_some("--no-huge");
        ["-s", MEMORY_MIB].into_iter().chain(no_huge).collect()
    }
}

/// The core mask of one core.
pub(super) fn mask(core: u32) -> String {
    format!("{:#x}", 1u128 << core)
}

/// Adds the ratio of both targets' rates to a measurement.
pub(super) fn compare(
    context: &RunContext<'_>,
    spdk: &SpdkPrograms,
    load: &RemoteLoad<'_>,
    cores: [u32; 2],
    measured: &mut Measurement,
) -> anyhow::Result<()> {
    let [target, host] = cores;
    let namespaces = TargetNamespaces::One(load.device);
    let mut rates = [0.0; 2];
    for (index, rate) in rates.iter_mut().enumerate() {
        measured.round_trips_ns.extend(placement::measure(cores));
        let server = if index == 0 {
            TargetServer::start(context, &target.to_string(), "spin", &namespaces, load.transport)?
        } else {
            TargetServer::start_spdk(context, spdk, target, &namespaces, load.transport)?
        };
        if load.device == BenchDevice::Malloc {
            let fill = IoPattern { rw: "write", block: "128k", depth: 16 };
            perf(context, spdk, &server, &fill, host)?;
        }
        let (measured_rate, command) = perf(context, spdk, &server, load.pattern, host)?;
        *rate = measured_rate;
        measured.commands.extend([server.command.clone(), command]);
        server.end()?;
    }
    measured.values.insert(BenchMetric::SpdkRatio, rates[0] / rates[1]);
    Ok(())
}

/// Runs SPDK's load generator on a core. Returns its IOPS and its command.
fn perf(
    context: &RunContext<'_>,
    spdk: &SpdkPrograms,
    server: &TargetServer,
    pattern: &IoPattern,
    core: u32,
) -> anyhow::Result<(f64, String)> {
    let bytes: u32 = pattern.block.trim_end_matches('k').parse::<u32>()? << 10;
    let mut command = Command::new(&spdk.perf);
    command.args(spdk.memory_options());
    command.args(["-q", &pattern.depth.to_string(), "-o", &bytes.to_string(), "-w", pattern.rw]);
    command.args([
        "-t",
        if context.quick { "1" } else { "2" },
        "-c",
        &mask(core),
        "-r",
        &server.transport_id(),
    ]);
    let mut process = ChildProcess::start(&mut command, context.directory, "spdk-perf")?;
    let status = process.wait(RUN_MAX).with_context(|| describe(&command))?;
    ensure!(
        status.success(),
        "{}: {status}: {}",
        describe(&command),
        context.directory.tail("spdk-perf.err")
    );
    let output = std::fs::read_to_string(context.directory.file("spdk-perf.out"))?;
    let iops = total_iops(&output).with_context(|| format!("{}: no total", describe(&command)))?;
    Ok((iops, describe(&command)))
}

/// IOPS in the line of totals, whose columns are IOPS, MiB/s and latencies.
fn total_iops(output: &str) -> Option<f64> {
    let line = output.lines().find(|line| line.trim_start().starts_with("Total"))?;
    line.split_once(':')?.1.split_whitespace().next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_total_of_spdk_nvme_perf_is_parsed() {
        let output = "========================================================\n\
            \x20                                                                       Latency(us)\n\
            Device Information                 :       IOPS      MiB/s    Average        min        max\n\
            TCP  (addr:127.0.0.1) NSID 1 from core  1:  511093.50    1996.46      62.60      21.10     921.34\n\
            ========================================================\n\
            Total                              :  511093.50    1996.46      62.60      21.10     921.34\n";
        assert_eq!(total_iops(output), Some(511_093.5));
        assert_eq!(total_iops("no I/O"), None);
        assert_eq!(mask(65), "0x20000000000000000");
    }
}
