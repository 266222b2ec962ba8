//! The reference of all metrics (docs/METRICS.md), generated from their declarations.

use std::fmt::Write;

use crate::Catalog;

const HEAD: &str = "\
# Metrics
This page is generated from the declarations of the metrics; to change it, change them and run

```
cargo run -p ringbolt -- metrics-reference > docs/METRICS.md
```

Two methods answer with the present values: [`metrics_get`](RPC.md#metrics_get) with JSON, and
[`metrics_get_openmetrics`](RPC.md#metrics_get_openmetrics) with OpenMetrics 1.0.0 text, which Prometheus scrapes. Both
ask all modules at once; no core waits for them. For a file that the node exporter's textfile collector reads:

```
ringbolt rpc metrics_get_openmetrics | jq -r . > /var/lib/node_exporter/ringbolt.prom
```

In the text, values of a counter are called `NAME_total`, and a histogram is `NAME_bucket`, `NAME_count` and `NAME_sum`.
Counters begin at 0 with the program, or with what their labels name. Statistics that an administrator resets
(`bdev_reset_iostat`) begin at 0 again, which scrapers recognise.

| metric | kind | unit | labels | |
| --- | --- | --- | --- | --- |
";

/// The reference in Markdown: every metric that a module of the catalog declares.
pub fn markdown(catalog: &Catalog) -> String {
    let mut text = HEAD.to_string();
    for metric in catalog.metrics() {
        let labels: Vec<String> = metric.labels.iter().map(|label| format!("`{label}`")).collect();
        let (kind, unit) = (metric.kind.name(), metric.unit.unwrap_or_default());
        // Writing to a string cannot fail.
        _ = writeln!(
            text,
            "| `{}` | {kind} | {unit} | {} | {} |",
            metric.name,
            labels.join(", "),
            metric.help()
        );
    }
    text
}
