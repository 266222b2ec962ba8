//! Shell commands that apply a recommendation.

use lab_experiments::PlannedDevice;
use serde_json::Value as Json;

use super::Decision;
use crate::medium::device_model;

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
    targets: &[&PlannedDevice],
    facts: &Json,
) -> Vec<String> {
    let mut lines = Vec::new();
    if let Some(name) = scheduler.recommended() {
        let device = |target: &PlannedDevice| {
            let name = target.path.strip_prefix("/dev/").filter(|_| target.kind == "block")?;
            let plain = !name.is_empty() && name.bytes().all(|byte| byte.is_ascii_alphanumeric());
            plain.then(|| (name.to_string(), device_model(target, facts)))
        };
        let devices: Vec<(String, String)> = targets.iter().filter_map(|target| device(target)).collect();
        for (device, _) in &devices {
            lines.push(format!("echo {name} > /sys/block/{device}/queue/scheduler"));
        }
        if !devices.is_empty() {
            let mut rule = "# to keep it, in /etc/udev/rules.d/60-scheduler.rules:".to_string();
            for (device, model) in &devices {
                rule.push_str(&udev_rule(device, model, name));
            }
            lines.push(rule);
        }
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

/// A rule for the measured device: by its name, and by its model where that is known, because names may change.
fn udev_rule(device: &str, model: &str, scheduler: &str) -> String {
    let plain = |letter: char| letter.is_ascii_alphanumeric() || " ._-".contains(letter);
    let model = match !model.is_empty() && model.chars().all(plain) {
        true => format!(" ATTRS{{model}}==\"{model}\","),
        false => String::new(),
    };
    format!(
        "\n# ACTION==\"add|change\", KERNEL==\"{device}\",{model} ATTR{{queue/scheduler}}=\"{scheduler}\""
    )
}
