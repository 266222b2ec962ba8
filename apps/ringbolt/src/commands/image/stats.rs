//! `ringbolt image stats`: what clients do to the images of a cluster, as its nodes count it.

use std::time::{Duration, Instant};

use clap::Args;
use serde_json::{Value, json};
use workload::units::{format_ns, format_rate};

use super::owner::{ImageOwner, print_table};
use crate::command_error::CommandError;
use crate::commands::store::{ClusterLayout, VolumeCounts, count_volumes};
use crate::console::{stderr_line, stdout_line};
use crate::options::parse_time;

/// Arguments of `ringbolt image stats`.
#[derive(Args)]
pub(crate) struct StatsArgs {
    /// Name [default: all images of all pools]
    name: Option<String>,
    /// Count for this time; 0s shows what was counted since the nodes started
    #[arg(long, value_name = "TIME", default_value = "1s", value_parser = parse_time)]
    interval: u64,
    /// Print JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    pub(super) of: ImageOwner,
}

/// Counts, and the seconds in which they came; without for those since the nodes started.
struct ImageCounts {
    image: String,
    counts: VolumeCounts,
    seconds: Option<f64>,
}

/// Asks the nodes, twice if there is an interval.
pub(super) fn run(options: &StatsArgs) -> Result<(), CommandError> {
    let of = &options.of;
    let layout = ClusterLayout::open(&of.cluster_directory(), &of.etcd.options())?;
    let mut images = layout.map.images().map_err(CommandError::operation)?;
    images.retain(|(pool, image), entry| {
        let is_named = options.name.as_ref().is_none_or(|name| *pool == of.pool && image == name);
        is_named && entry.trashed.is_none()
    });
    if let (Some(name), true) = (&options.name, images.is_empty()) {
        return Err(CommandError::operation(format!("there is no image {}/{name}", of.pool)));
    }
    let started = Instant::now();
    let mut counted = count_volumes(&layout)?;
    let mut seconds = None;
    if options.interval > 0 {
        std::thread::sleep(Duration::from_nanos(options.interval));
        let later = count_volumes(&layout)?;
        seconds = Some(started.elapsed().as_secs_f64());
        let before = std::mem::replace(&mut counted, later);
        for (volume, counts) in &mut counted.volumes {
            *counts = counts.since(before.volumes.get(volume).copied().unwrap_or_default());
        }
    }
    if !counted.silent.is_empty() {
        let silent = counted.silent.iter().map(u32::to_string).collect::<Vec<_>>().join(", ");
        stderr_line!("ringbolt: node {silent} does not answer: what it counts is missing");
    }
    let counts = images.iter().map(|((pool, name), entry)| ImageCounts {
        image: format!("{pool}/{name}"),
        counts: counted.volumes.get(&entry.volume).copied().unwrap_or_default(),
        seconds,
    });
    let counts: Vec<ImageCounts> = counts.collect();
    match options.json {
        true => stdout_line!("{:#}", Value::Array(counts.iter().map(to_json).collect())),
        false => print(&counts, seconds.is_some()),
    }
    Ok(())
}

/// The mean time of a request; `None` without one.
fn mean_ns(ns: u64, requests: u64) -> Option<u64> {
    ns.checked_div(requests)
}

fn to_json(of: &ImageCounts) -> Value {
    let VolumeCounts { reads, read_bytes, read_ns, writes, written_bytes, write_ns } = of.counts;
    json!({
        "image": of.image,
        "seconds": of.seconds,
        "reads": reads,
        "read_bytes": read_bytes,
        "read_mean_ns": mean_ns(read_ns, reads),
        "writes": writes,
        "written_bytes": written_bytes,
        "write_mean_ns": mean_ns(write_ns, writes),
    })
}

fn print(counts: &[ImageCounts], are_rates: bool) {
    let rows = counts.iter().map(|ImageCounts { image, counts, seconds }| {
        let VolumeCounts { reads, read_bytes, read_ns, writes, written_bytes, write_ns } = *counts;
        let per_second = |count: u64| count as f64 / seconds.unwrap_or(1.0);
        let number = |count: u64| format!("{:.0}", per_second(count));
        let bytes = |bytes: u64| match are_rates {
            true => format_rate(per_second(bytes)),
            false => format!("{:.1} MiB", bytes as f64 / f64::from(1 << 20)),
        };
        let mean = |ns, requests| mean_ns(ns, requests).map_or("-".to_string(), |ns| format_ns(ns as f64));
        [
            image.clone(),
            number(reads),
            bytes(read_bytes),
            mean(read_ns, reads),
            number(writes),
            bytes(written_bytes),
            mean(write_ns, writes),
        ]
    });
    let header = match are_rates {
        true => ["image", "reads/s", "read", "read time", "writes/s", "written", "write time"],
        false => ["image", "reads", "read", "read time", "writes", "written", "write time"],
    };
    print_table(header, rows);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mean_needs_a_request() {
        assert_eq!((mean_ns(30, 4), mean_ns(0, 0)), (Some(7), None));
        let counts = VolumeCounts { reads: 2, read_bytes: 8192, read_ns: 300, ..VolumeCounts::default() };
        let described = to_json(&ImageCounts { image: "pool/vol".to_string(), counts, seconds: Some(2.0) });
        assert_eq!((&described["read_mean_ns"], &described["write_mean_ns"]), (&150.into(), &Value::Null));
        assert_eq!((&described["seconds"], &described["read_bytes"]), (&2.0.into(), &8192.into()));
    }
}
