//! Metrics of the connections of targets: one declaration for all targets.

use ::control::{Metric, MetricSamples};

use crate::group::ConnectionTotals;

::control::metrics! {
    /// Of the connections of targets, by transport.
    static CONNECTION_METRICS {
        /// Open connections of a target
        OPEN = "ringbolt_target_connections": gauge [target];
        /// Open connections whose peers have not logged in
        PENDING_LOGINS = "ringbolt_target_pending_logins": gauge [target];
        /// Connections that were accepted
        ACCEPTED = "ringbolt_target_accepted": counter [target];
        /// Connections whose peers have logged in; without a login all that were accepted
        LOGINS = "ringbolt_target_logins": counter [target];
        /// Connections that a limit has refused or closed
        REFUSED = "ringbolt_target_refused": counter [target];
        /// Connections that were closed
        CLOSED = "ringbolt_target_closed": counter [target];
        /// Moves of connections from one core to another, as `framework_set_scheduler` has them
        MOVED = "ringbolt_target_moved": counter [target];
    }
}

/// The metrics of connections, for [`Module::metrics`](control::Module::metrics) of every target.
pub fn connection_metrics() -> Vec<&'static Metric> {
    CONNECTION_METRICS.to_vec()
}

/// Adds the connections of a target, for [`Module::collect`](control::Module::collect). `target` names the
/// target and, where it has several, the transport.
pub fn collect_connections(target: &str, totals: ConnectionTotals, samples: &mut MetricSamples) {
    let ConnectionTotals { open, pending_logins, accepted, logins, refused, closed, moved } = totals;
    for (metric, value) in [
        (&OPEN, open),
        (&PENDING_LOGINS, pending_logins),
        (&ACCEPTED, accepted),
        (&LOGINS, logins),
        (&REFUSED, refused),
        (&CLOSED, closed),
        (&MOVED, moved),
    ] {
        samples.add(metric, &[target], value);
    }
}
