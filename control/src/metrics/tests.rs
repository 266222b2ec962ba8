use super::*;

crate::metrics! {
    /// For the tests.
    static TEST {
        /// Things that were done,
        /// of each kind
        DONE = "ringbolt_test_done": counter [device, kind];
        /// Memory
        MEMORY = "ringbolt_test_memory_bytes": gauge ("bytes");
        /// Time that things took
        TIME = "ringbolt_test_time_seconds": histogram ("seconds") [device];
    }
}

fn samples() -> MetricSamples {
    let mut samples = MetricSamples::default();
    samples.add(&MEMORY, &[], 4096_u64);
    samples.add(&DONE, &["a\\\"b\nc", "read"], 2_u64);
    samples.add(&DONE, &["d", "read"], 1_u64);
    samples.add(&DONE, &["d", "read"], 4_u32);
    let half = |count| HistogramSample { buckets: vec![(0.5, 1), (1.0, count)], count, sum: 1.25 };
    samples.add(&TIME, &["d"], half(2));
    samples.add(&TIME, &["d"], half(3));
    samples
}

#[test]
fn text_json_and_declaration_agree() {
    assert_eq!(
        samples().openmetrics(),
        "# TYPE ringbolt_test_done counter\n\
        # HELP ringbolt_test_done Things that were done, of each kind.\n\
        ringbolt_test_done_total{device=\"a\\\\\\\"b\\nc\",kind=\"read\"} 2\n\
        ringbolt_test_done_total{device=\"d\",kind=\"read\"} 5\n\
        # TYPE ringbolt_test_memory_bytes gauge\n\
        # UNIT ringbolt_test_memory_bytes bytes\n\
        # HELP ringbolt_test_memory_bytes Memory.\n\
        ringbolt_test_memory_bytes 4096\n\
        # TYPE ringbolt_test_time_seconds histogram\n\
        # UNIT ringbolt_test_time_seconds seconds\n\
        # HELP ringbolt_test_time_seconds Time that things took.\n\
        ringbolt_test_time_seconds_bucket{device=\"d\",le=\"0.5\"} 2\n\
        ringbolt_test_time_seconds_bucket{device=\"d\",le=\"1.0\"} 5\n\
        ringbolt_test_time_seconds_bucket{device=\"d\",le=\"+Inf\"} 5\n\
        ringbolt_test_time_seconds_count{device=\"d\"} 5\n\
        ringbolt_test_time_seconds_sum{device=\"d\"} 2.5\n\
        # EOF\n"
    );
    let json = samples().to_json(Some("ringbolt_test_time_seconds"));
    assert_eq!(
        json,
        [json!({
            "name": "ringbolt_test_time_seconds", "kind": "histogram", "unit": "seconds",
            "help": "Time that things took",
            "samples": [{ "labels": { "device": "d" }, "count": 5, "sum": 2.5,
                "buckets": [{ "le": 0.5, "count": 2 }, { "le": 1.0, "count": 5 }] }],
        })]
    );
    assert_eq!(samples().to_json(None).len(), TEST.len());
    assert_eq!(samples().get(&DONE, &["d", "read"]), Some(&MetricValue::Whole(5)));
    assert_eq!(samples().get(&DONE, &["d", "write"]), None);
}

#[test]
#[should_panic(expected = "ringbolt_test_done has the labels")]
fn a_sample_without_its_labels_is_our_error() {
    MetricSamples::default().add(&DONE, &["d"], 1_u64);
}

#[test]
#[should_panic(expected = "begins with ringbolt_")]
fn a_name_belongs_to_the_program() {
    Metric::declare("node_load", MetricKind::gauge, &[], &[], "");
}

#[test]
#[should_panic(expected = "ends with its unit")]
fn a_name_ends_with_its_unit() {
    Metric::declare("ringbolt_time", MetricKind::gauge, &["seconds"], &[], "");
}
