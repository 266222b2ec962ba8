//! Synthetic runs: the published experiments with values from a simple model, plus sweeps up to the requested
//! number of cells. No value is a measurement.

use lab_experiments::{
    CellParameters, CellRecord, ExperimentCatalog, ExperimentDefinition, MachineRecord, ParameterValue,
    PlannedCell, PlannedDevice, PlannedExperiment, RunDirectory, RunPlan, SCHEMA, Scale, SchedulerState,
    TimelineSlice,
};

/// A run of about `cells` cells, each measured `repetitions` times.
pub(crate) fn run(cells: usize, repetitions: u32) -> RunDirectory {
    let mut run = RunDirectory { machine: machine(), plan: plan(), ..RunDirectory::default() };
    let mut made = 0;
    for definition in ExperimentCatalog::built_in().definitions() {
        made += add(&mut run, definition, cells.saturating_sub(made), repetitions);
    }
    for number in 0.. {
        if made >= cells {
            break;
        }
        made += add(&mut run, &sweep(number), cells - made, repetitions);
    }
    run
}

/// A user-defined experiment of 192 cells.
fn sweep(number: usize) -> ExperimentDefinition {
    let text = format!(
        "id = 'own.sweep{number}'\ntitle = 'Sweep {number}: depth, processes and request size'\nx = 'iodepth'\n\
         y = 'clat_p99_us'\nx_metric = 'iops'\nseries = ['scheduler']\n[fixed]\napi = 'iou'\ndevices = 1\n\
         [vary]\nscheduler = ['none', 'bfq', 'kyber', 'mq-deadline']\niodepth = [1, 2, 4, 8, 16, 32, 64, 128]\n\
         jobs = [1, 4]\nblock_bytes = [4096, 8192, 65536]\n[time]\nruntime_s = {}\nramp_s = 1\n",
        number + 1
    );
    ExperimentDefinition::parse(&text).unwrap()
}

fn add(run: &mut RunDirectory, definition: &ExperimentDefinition, room: usize, repetitions: u32) -> usize {
    let cells = definition.cells(Scale::Default).unwrap();
    let cells: Vec<CellParameters> = cells.into_iter().take(room).collect();
    if cells.is_empty() && definition.derived_from.is_empty() {
        return 0;
    }
    let mut planned = Vec::new();
    for (index, parameters) in cells.iter().enumerate() {
        let series = definition.series_of(parameters);
        let skipped = skipped(parameters);
        planned.push(PlannedCell {
            series: series.clone(),
            parameters: parameters.clone(),
            repetitions,
            seconds: 5.0,
            skipped: skipped.clone(),
            ..PlannedCell::default()
        });
        for repetition in 0..if skipped.is_some() { 1 } else { repetitions } {
            let mut record = CellRecord::new(&definition.id, &series);
            record.parameters = parameters.clone();
            record.repetition = repetition;
            record.started_unix_ms = 1_790_000_000_000 + run.records.len() as u64 * 5_000;
            record.duration_s = 5.0;
            record.skipped = skipped.clone();
            if skipped.is_none() {
                measure(&mut record, index as u64 * 31 + u64::from(repetition));
            }
            run.records.push(record);
        }
    }
    run.plan.experiments.push(PlannedExperiment {
        id: definition.id.clone(),
        definition: toml::to_string(definition).unwrap(),
        scaled: vec!["5 s instead of 120 s".into()],
        cells: planned,
    });
    cells.len()
}

/// The skip reason of a machine without PCI pass-through.
fn skipped(parameters: &CellParameters) -> Option<String> {
    let api = parameters.get("api").and_then(ParameterValue::as_str)?;
    api.starts_with("spdk").then(|| "no NVMe device is bound to vfio-pci".to_string())
}

/// Models a device of 700 KIOPS and 70 us with 350 KIOPS per core, and a cost factor for each scheduler and
/// API.
fn measure(record: &mut CellRecord, seed: u64) {
    let parameters = record.parameters.clone();
    let number = |name: &str| parameters.get(name).and_then(ParameterValue::as_f64);
    let word =
        |name: &str| parameters.get(name).and_then(ParameterValue::as_str).unwrap_or_default().to_string();
    let noise =
        1.0 + ((seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40) as f64 / f64::from(1 << 24) - 0.5) * 0.04;
    let (jobs, depth) = (number("jobs").unwrap_or(1.0), number("iodepth").unwrap_or(1.0));
    let devices = number("devices").unwrap_or(1.0).min(2.0);
    let size = (number("block_bytes").unwrap_or(4096.0) / 4096.0).max(1.0);
    let background = number("background").unwrap_or(0.0);
    let cost = match word("scheduler").as_str() {
        "bfq" => 1.55,
        "kyber" => 1.12,
        "mq-deadline" => 1.22,
        _ => 1.0,
    } * match word("api").as_str() {
        "psync" => 0.95,
        "aio" => 1.1,
        "iou-c" => 0.85,
        "iou-s" => 0.6,
        _ => 1.0,
    };
    let cores = jobs.min(4.0);
    let most = (350_000.0 * cores / cost).min(700_000.0 * devices) / size;
    let wanted = jobs * depth / 70e-6;
    let iops = noise * most * wanted / (most.powi(3) + wanted.powi(3)).cbrt() / (1.0 + background * 0.8);
    let mean = jobs * depth / iops * 1e6;
    let tail = mean
        * (1.3 + 0.25 * (cost - 1.0))
        * (1.0 + background * background.sqrt() * if cost > 1.2 { 0.4 } else { 2.0 });
    let used = (iops * 2.9e-6 * cost).min(cores);
    let rw = word("background_rw");
    let fg = record.role_mut("fg");
    for (name, value) in [
        ("iops", iops),
        ("bw_mib_s", iops * size / 256.0),
        ("lat_mean_us", mean),
        ("clat_mean_us", mean - 1.5),
        ("clat_p50_us", mean * 0.96),
        ("clat_p99_us", tail),
        ("clat_p999_us", tail * 1.4),
        ("cpu_cores", used),
        ("cpu_ns_per_io", used / iops * 1e9),
        ("instructions_per_io", 11_000.0 * cost),
        ("ipc", 0.7 / cost),
        ("cache_miss_ratio", 0.04 * cost),
        ("share_generator_pct", 20.0),
        ("share_io_library_pct", 12.0 * cost),
        ("share_block_layer_pct", 30.0),
        ("share_driver_pct", 14.0),
        ("share_kernel_pct", 24.0 - 12.0 * (cost - 1.0)),
        ("lock_share_pct", 3.0 * cost.powi(6)),
    ] {
        fg.set(name, value);
    }
    fg.histograms.insert("clat".into(), histogram(mean, tail, iops));
    // Charts of some cells are enough to look at.
    if seed % 5 < 2 {
        fg.timeline = timeline(mean, tail, iops);
    }
    let all = record.role_mut("all");
    all.set("instructions_per_io", 19_000.0 * cost);
    all.set("lock_share_pct", 3.0 * cost.powi(6));
    if !rw.is_empty() && background > 0.0 {
        record.role_mut("bg").set("iops", 90_000.0 * noise);
    }
    record.generator.name = "ringbolt".into();
    record.generator.version = "0.1.0".into();
    record.generator.cost_ns_per_io = Some(310.0);
    record.submission_path = Some("inline".into());
    let scheduler = word("scheduler");
    record.schedulers.push(SchedulerState {
        device: "nvme0n1".into(),
        scheduler: if scheduler.is_empty() { "none".into() } else { scheduler },
        ..SchedulerState::default()
    });
    record.commands.push(format!(
        "ringbolt perf --filename=uring:/dev/nvme0n1 --rw=randread --bs={} --iodepth={depth} --numjobs={jobs} --runtime=4s --time_based --output-format=json",
        size * 4096.0
    ));
}

/// 20 intervals of 200 ms; throughput sinks by a fifth.
fn timeline(mean: f64, tail: f64, iops: f64) -> Vec<TimelineSlice> {
    let slice = |number: u32| {
        let ios = iops * (1.0 - f64::from(number) / 100.0);
        let mut clat: Vec<(u64, u64)> = Vec::new();
        for (ns, count) in histogram(mean, tail, ios / 20.0) {
            // As the generator's buckets: four for each power of two.
            let unit = 1 << (ns.max(4).ilog2() - 2);
            let highest = (ns / unit + 1) * unit - 1;
            match clat.last_mut() {
                Some((known, sum)) if *known == highest => *sum += count,
                _ => clat.push((highest, count)),
            }
        }
        let ios = clat.iter().map(|(_, count)| count).sum();
        TimelineSlice { at_ms: f64::from(number + 1) * 200.0, ios, clat }
    };
    (0..20).map(slice).collect()
}

/// A log-normal body around the mean whose tail reaches P99 at `tail`.
fn histogram(mean: f64, tail: f64, iops: f64) -> Vec<(u64, u64)> {
    let total = iops * 4.0;
    let width = ((tail / mean).ln() / 2.33).max(0.05);
    (-40i32..=90)
        .filter_map(|step| {
            let place = f64::from(step) / 20.0;
            let weight = (-0.5 * place * place).exp() / 50.0 + 1e-5 * (-f64::from(step.abs()) / 40.0).exp();
            let count = (total * weight).round() as u64;
            let ns = (mean * 1e3 * (place * width).exp()) as u64;
            (count > 0).then_some((ns, count))
        })
        .collect()
}

fn machine() -> MachineRecord {
    MachineRecord {
        schema: SCHEMA,
        collected_unix_ms: 1_790_000_000_000,
        collected_by: "ringbolt 0.1.0".into(),
        facts: serde_json::json!({
            "cpu": { "model": "Example CPU 4 GHz", "cores": 4, "smt": false, "governor": "performance", "turbo": true },
            "kernel": { "release": "6.12.0", "cmdline": "quiet" },
            "devices": [{ "name": "nvme0n1", "model": "Example SSD 1 TB", "schedulers": ["none", "mq-deadline", "kyber", "bfq"], "poll_queues": 2 }],
            "counters": { "instructions": true, "reason": null },
        }),
        distortions: vec!["Turbo is on: a core's speed depends on its neighbours.".into()],
    }
}

fn plan() -> RunPlan {
    RunPlan {
        schema: SCHEMA,
        program: "ringbolt 0.1.0".into(),
        command: ["ringbolt", "lab", "run", "all", "--device", "/dev/nvme0n1"].map(String::from).to_vec(),
        selection: vec!["all".into()],
        scale: "default".into(),
        seed: 1,
        order_seed: 1,
        self_check: false,
        generator: "ringbolt".into(),
        cores: vec![0, 1, 2, 3],
        targets: vec![PlannedDevice {
            kind: "block".into(),
            path: "/dev/nvme0n1".into(),
            size_bytes: 1 << 40,
            described: "Example SSD 1 TB".into(),
        }],
        experiments: Vec::new(),
    }
}
