//! I/O priorities, of jobs and of single I/Os, and the NUMA nodes of jobs.

use os::{MemoryPolicy, RequestPriorities};

use super::{OptionInfo, job, switch};
use crate::PriorityShare;
use crate::jobfile::values::*;

/// I/O priorities and NUMA nodes.
pub(super) const PRIORITIES: &[OptionInfo] = &[
    job("prio", &["ioprio"], "0-7", "I/O priority within its class", |job, v| {
        job.io_priority = Some((job.io_priority.map_or(2, |(class, _)| class), in_range(v, 0, 7)? as u8));
        Ok(())
    }),
    job(
        "prioclass",
        &["ioprio_class"],
        "1-3",
        "I/O priority class: 1 real time, 2 best effort, 3 idle",
        |job, v| {
            job.io_priority = Some((in_range(v, 1, 3)? as u8, job.io_priority.map_or(0, |(_, level)| level)));
            Ok(())
        },
    ),
    job(
        "cmdprio_percentage",
        &[],
        "20",
        "percentage of reads[,writes] with the I/O priority of cmdprio and cmdprio_class: libaio and io_uring",
        |job, v| {
            job.command_priority.percent = reads_and_writes(v, job.command_priority.percent, 0, 100)?;
            Ok(())
        },
    ),
    job(
        "cmdprio_class",
        &[],
        "1",
        "I/O priority class of these reads[,writes]: 1 real time, as by default, 2 best effort, 3 idle",
        |job, v| {
            job.command_priority.class = reads_and_writes(v, job.command_priority.class, 0, 3)?;
            Ok(())
        },
    ),
    job("cmdprio", &[], "0", "I/O priority of these reads[,writes] within the class, 0 to 7", |job, v| {
        job.command_priority.level = reads_and_writes(v, job.command_priority.level, 0, 7)?;
        Ok(())
    }),
    job(
        "cmdprio_bssplit",
        &[],
        "4k/20:64k/10/1/0",
        "percentages of I/Os of a size that have a priority: SIZE/PERCENT, or SIZE/PERCENT/CLASS/PRIO[/HINT], of reads[,writes]",
        |job, v| {
            let [reads, writes, _] = per_direction(v, |part| priority_split(part, job.kb_base))?;
            job.command_priority.split = [reads.unwrap_or_default(), writes.unwrap_or_default()];
            Ok(())
        },
    ),
    switch("log_offset", "logs have the offset of each I/O in a column before the last", |job, v| {
        job.spec.log.has_offsets = flag(v)?;
        Ok(())
    }),
    switch(
        "log_prio",
        "the last column of logs is the I/O priority, hexadecimal: class × 8192 + priority; otherwise 1 for the real-time class",
        |job, v| {
            job.spec.log.priority_values = flag(v)?;
            Ok(())
        },
    ),
    job("numa_cpu_nodes", &[], "0-1", "run on the cores of these NUMA nodes, or of all", |job, v| {
        job.numa_cpu_nodes = Some(nodes(v)?);
        Ok(())
    }),
    job(
        "numa_mem_policy",
        &[],
        "bind:0",
        "NUMA nodes of the buffers: default, local, prefer:NODE, bind:NODES or interleave:NODES, with all for each node",
        |job, v| {
            job.memory_policy = Some(memory_policy(v)?);
            Ok(())
        },
    ),
];

/// One value for reads and writes, or one each; an empty one leaves the setting.
fn reads_and_writes(text: &str, now: [u8; 2], low: u64, high: u64) -> Result<[u8; 2], String> {
    let [reads, writes, trims] = per_direction(text, |part| in_range(part, low, high))?;
    if text.split(',').count() > 2 && trims.is_some() {
        return Err("it is for reads and writes".to_string());
    }
    let value = |given: Option<u64>, now: u8| given.map_or(now, |given| given as u8);
    Ok([value(reads, now[0]), value(writes, now[1])])
}

/// `64k/25/1/1:64k/75:1024k/0`; 0 percent means nothing. `priority` is 0 for that of `cmdprio`.
fn priority_split(text: &str, base: u64) -> Result<Vec<PriorityShare>, String> {
    let mut shares: Vec<PriorityShare> = Vec::new();
    for part in text.split(':').filter(|part| !part.trim().is_empty()) {
        let fields: Vec<&str> = part.split('/').map(str::trim).collect();
        let (size, percent, priority) = match fields.as_slice() {
            [size, percent] => (*size, *percent, 0),
            [size, percent, class, level] => {
                let (class, level) = (in_range(class, 1, 3)? as u8, in_range(level, 0, 7)? as u8);
                (*size, *percent, RequestPriorities::value(class, level))
            }
            [size, percent, class, level, hint] => {
                let (class, level) = (in_range(class, 1, 3)? as u8, in_range(level, 0, 7)? as u8);
                // `IOPRIO_HINT_SHIFT` of `linux/ioprio.h`.
                let hint = in_range(hint, 0, 1023)? as u16;
                (*size, *percent, RequestPriorities::value(class, level) | hint << 3)
            }
            _ => {
                return Err("it is SIZE/PERCENT or SIZE/PERCENT/CLASS/PRIO[/HINT], several separated by :"
                    .to_string());
            }
        };
        let (size, percent) = (bytes_u32(size, base)?, in_range(percent, 0, 100)? as u8);
        if percent > 0 {
            shares.push(PriorityShare { block_bytes: Some(size), percent, priority });
        }
        let of_size = shares.iter().filter(|share| share.block_bytes == Some(size));
        let total: u32 = of_size.map(|share| u32::from(share.percent)).sum();
        if total > 100 {
            return Err(format!("its percentages of {size} bytes add up to {total}, not at most 100"));
        }
    }
    Ok(shares)
}

/// NUMA nodes as in `0-1,3`; empty for all.
fn nodes(text: &str) -> Result<Vec<u32>, String> {
    if text.trim() == "all" {
        return Ok(Vec::new());
    }
    let mut nodes = Vec::new();
    for part in text.split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last) = (in_range(first, 0, 1023)?, in_range(last, 0, 1023)?);
        nodes.extend((first..=last).map(|node| node as u32));
    }
    match nodes.is_empty() {
        true => Err("it is a list of nodes, as 0-1,3, or all".to_string()),
        false => Ok(nodes),
    }
}

/// `bind:0-1`. `all` is an empty list here.
fn memory_policy(text: &str) -> Result<MemoryPolicy, String> {
    let (mode, list) = text.split_once(':').unwrap_or((text, ""));
    let given = || match list.trim() {
        "" => Err(format!("{mode} needs nodes: {mode}:0")),
        list => nodes(list),
    };
    match mode.trim() {
        "default" | "local" if !list.is_empty() => Err(format!("{mode} has no nodes")),
        "default" => Ok(MemoryPolicy::Default),
        "local" => Ok(MemoryPolicy::Local),
        "prefer" => match given()?.as_slice() {
            [node] => Ok(MemoryPolicy::Preferred(*node)),
            _ => Err("prefer has one node".to_string()),
        },
        "bind" => Ok(MemoryPolicy::Bind(given()?)),
        "interleave" => Ok(MemoryPolicy::Interleave(given()?)),
        _ => Err("it is one of default, local, prefer, bind, interleave".to_string()),
    }
}
