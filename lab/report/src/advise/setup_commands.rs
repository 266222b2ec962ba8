//! Shell commands that apply a recommendation.

use lab_experiments::PlannedDevice;

use super::Decision;

/// The API's display name, fio's options for it, and the liburing call that sets it up.
fn api(name: &str) -> Option<(&'static str, &'static str, Option<&'static str>)> {
    Some(match name {
        "psync" => ("POSIX pread and pwrite", "--ioengine=psync", None),
        "aio" => ("Linux AIO", "--ioengine=libaio", None),
        "iou" => ("io_uring", "--ioengine=io_uring", Some("io_uring_queue_init(depth, &ring, 0)")),
        "iou-c" => (
            "io_uring with completion polling",
            "--ioengine=io_uring --hipri=1",
            Some(
                "io_uring_queue_init(depth, &ring, IORING_SETUP_IOPOLL); the nvme driver needs poll_queues > 0",
            ),
        ),
        "iou-s" => (
            "io_uring with submission polling",
            "--ioengine=io_uring --sqthread_poll=1",
            Some(
                "io_uring_queue_init(depth, &ring, IORING_SETUP_SQPOLL)\n# a kernel thread keeps a second core busy",
            ),
        ),
        "spdk" => ("a user-space NVMe driver under fio", "--ioengine=spdk --thread=1", None),
        "spdk-perf" => ("a user-space NVMe driver", "", None),
        _ => return None,
    })
}

/// The display name of an API; an unknown `name` is returned unchanged.
pub fn api_description(name: &str) -> &str {
    api(name).map_or(name, |(words, ..)| words)
}

/// Shell commands, with comments for the steps that need code or a udev rule.
pub(super) fn commands(
    api_decision: &Decision,
    scheduler: &Decision,
    targets: &[PlannedDevice],
) -> Vec<String> {
    let mut lines = Vec::new();
    if let Some(name) = scheduler.recommended() {
        let mut devices: Vec<&str> = targets
            .iter()
            .filter(|target| matches!(target.kind.as_str(), "block" | "null_blk" | "loop"))
            .filter_map(|target| target.path.strip_prefix("/dev/"))
            .filter(|device| !device.is_empty() && device.bytes().all(|byte| byte.is_ascii_alphanumeric()))
            .collect();
        if devices.is_empty() {
            devices.push("DEVICE");
        }
        for device in devices {
            lines.push(format!("echo {name} > /sys/block/{device}/queue/scheduler"));
        }
        lines.push(format!(
            "# to keep it, in /etc/udev/rules.d/60-scheduler.rules:\n\
             # ACTION==\"add|change\", KERNEL==\"nvme*n*\", ATTR{{queue/scheduler}}=\"{name}\""
        ));
    }
    if let Some((words, fio, liburing)) = api_decision.recommended().and_then(api) {
        lines.push(if fio.is_empty() {
            format!("# {words}: SPDK's, or ringbolt perf --filename=nvme+pci://ADDRESS")
        } else {
            format!("fio {fio} --direct=1")
        });
        if let Some(flags) = liburing {
            lines.push(format!("# in C: {flags}"));
        }
    }
    lines
}
