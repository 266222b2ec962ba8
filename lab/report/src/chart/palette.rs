//! Assigns colours to series names, consistently across charts.

/// Number of colours in the page's style sheet (classes `c0`, `c1`, …).
pub(crate) const COLOURS: usize = 8;

/// Known series names: one table for each kind of series, so that colours within a chart differ.
const KNOWN: [&[&str]; 4] = [
    &["none", "bfq", "kyber", "mq-deadline", "spdk"],
    &[
        "psync",
        "libaio",
        "io_uring",
        "io_uring-poll",
        "io_uring-sqpoll",
        "ringbolt-nvme",
        "spdk",
        "spdk-perf",
    ],
    &["psync", "aio", "iou", "iou-c", "iou-s", "ringbolt", "spdk-fio", "spdk-perf"],
    &["generator", "I/O library", "block layer", "NVMe driver", "kernel", "scheduler", "idle", "locks"],
];

/// The colour indices of `names`, in order. Known names have fixed colours; others get the least used one.
pub(crate) fn colours<'a>(names: impl Iterator<Item = &'a str>) -> Vec<usize> {
    let names: Vec<&str> = names.collect();
    let known = |table: &[&str]| names.iter().filter(|name| table.contains(name)).count();
    // `rev` makes the first table win a tie: schedulers before engines.
    let table = KNOWN.iter().rev().max_by_key(|table| known(table)).copied().unwrap_or_default();
    let mut taken: Vec<(&str, usize)> = Vec::new();
    for (index, name) in table.iter().enumerate() {
        if names.contains(name) {
            taken.push((name, index % COLOURS));
        }
    }
    let mut out = Vec::with_capacity(names.len());
    for name in names {
        let colour = taken.iter().find(|(other, _)| *other == name).map(|(_, colour)| *colour);
        out.push(colour.unwrap_or_else(|| {
            let used = |colour: &usize| taken.iter().filter(|(_, other)| other == colour).count();
            let colour = (0..COLOURS).min_by_key(used).unwrap_or(0);
            taken.push((name, colour));
            colour
        }));
    }
    out
}
