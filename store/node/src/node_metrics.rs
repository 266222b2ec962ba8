//! Metrics of a node: its connections, and what clients do to volumes.

use std::cmp::Reverse;

use control::{Metric, MetricSamples};

use crate::NodeServer;

control::metrics! {
    /// Of a node of the replicated store.
    pub(crate) static NODE_METRICS {
        /// Connections of nodes and clients that have proved who they are; `kind` is `tls` or `plain`
        CONNECTIONS = "ringbolt_store_connections": gauge [kind];
        /// Connections that were refused because there were too many, of all clients or with one key
        REFUSED = "ringbolt_store_refused_connections": counter;
        /// Requests of clients that primaries of this node have carried out, by the volume of their image
        OPERATIONS = "ringbolt_store_volume_operations": counter [volume, operation];
        /// Bytes of these requests
        BYTES = "ringbolt_store_volume_bytes": counter ("bytes") [volume, operation];
        /// Times of these requests together, from arrival at the primary to the answer of a read, and to the
        /// commitment of a write
        TIME = "ringbolt_store_volume_seconds": counter ("seconds") [volume, operation];
        /// Bytes of objects that scrubs have compared at all members of their groups, by the primary's node
        SCRUBBED = "ringbolt_store_scrubbed_bytes": counter ("bytes");
        /// Copies of blocks that scrubs have found; `finding` is `damaged` for those that could not be read,
        /// `repaired` for those of them that were written again, and `differing` for other data than the
        /// primary's
        FINDINGS = "ringbolt_store_scrub_findings": counter [finding];
        /// Wake-ups of non-priority threads, of a node with prioritized threads; `cause` is `count` or `time`
        /// for entries that go in place, `full_log` for what frees space, `waiting_read` for a read that
        /// waits for these, `read` for one that needs what is in place, `checkpoint`, or `other`
        WAKES = "ringbolt_store_thread_wakes": counter [cause];
        /// How woken threads were placed: `idle_core` of the non-priority pool, or by the `kernel`
        PLACEMENTS = "ringbolt_store_thread_placements": counter [placement];
    }
}

/// Volumes that have samples, those with the most requests first: each has six.
const VOLUMES_MAX: usize = 1024;

pub(crate) fn declared() -> Vec<&'static Metric> {
    NODE_METRICS.to_vec()
}

pub(crate) fn collect(server: &NodeServer, samples: &mut MetricSamples) {
    let (tls, plain, refused) = server.connections();
    samples.add(&CONNECTIONS, &["tls"], tls);
    samples.add(&CONNECTIONS, &["plain"], plain);
    samples.add(&REFUSED, &[], refused);
    let scrub = server.scrub_status();
    samples.add(&SCRUBBED, &[], scrub.bytes);
    for (finding, count) in
        [("damaged", scrub.damaged), ("repaired", scrub.repaired), ("differing", scrub.differing)]
    {
        samples.add(&FINDINGS, &[finding], count);
    }
    if let Some(threads) = server.threads().prioritized() {
        for (cause, count) in threads.wakes() {
            samples.add(&WAKES, &[cause], count);
        }
        let (idle_core, kernel) = threads.placements();
        samples.add(&PLACEMENTS, &["idle_core"], idle_core);
        samples.add(&PLACEMENTS, &["kernel"], kernel);
    }
    let mut volumes: Vec<_> = server.volumes().into_iter().collect();
    volumes.sort_by_key(|(_, stats)| Reverse(stats.reads.saturating_add(stats.writes)));
    for (volume, stats) in volumes.into_iter().take(VOLUMES_MAX) {
        let volume = volume.map_or("others".to_string(), |volume| volume.to_string());
        for (operation, requests, bytes, ns) in [
            ("read", stats.reads, stats.read_bytes, stats.read_ns),
            ("write", stats.writes, stats.written_bytes, stats.write_ns),
        ] {
            let labels = [volume.as_str(), operation];
            samples.add(&OPERATIONS, &labels, requests);
            samples.add(&BYTES, &labels, bytes);
            samples.add(&TIME, &labels, ns as f64 / 1e9);
        }
    }
}
