//! What clients do to images, as the nodes of a cluster count it.

use std::collections::BTreeMap;

use serde_json::Value;

use super::ask::{self, NodeReply};
use crate::command_error::CommandError;
use crate::commands::store::layout::ClusterLayout;

/// Requests for a volume since its nodes started.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct VolumeCounts {
    pub(crate) reads: u64,
    pub(crate) read_bytes: u64,
    pub(crate) read_ns: u64,
    pub(crate) writes: u64,
    pub(crate) written_bytes: u64,
    pub(crate) write_ns: u64,
}

/// Those of all volumes, by volume, and the nodes that did not answer.
pub(crate) struct CountedVolumes {
    pub(crate) volumes: BTreeMap<u64, VolumeCounts>,
    pub(crate) silent: Vec<u32>,
}

impl VolumeCounts {
    fn fields(&mut self) -> [(&'static str, &mut u64); 6] {
        [
            ("reads", &mut self.reads),
            ("read_bytes", &mut self.read_bytes),
            ("read_ns", &mut self.read_ns),
            ("writes", &mut self.writes),
            ("written_bytes", &mut self.written_bytes),
            ("write_ns", &mut self.write_ns),
        ]
    }

    /// What has come since. A node that was restarted counts anew.
    pub(crate) fn since(mut self, mut before: VolumeCounts) -> VolumeCounts {
        for ((_, after), (_, before)) in self.fields().into_iter().zip(before.fields()) {
            *after = after.saturating_sub(*before);
        }
        self
    }
}

/// Asks all nodes. The map is asked for their addresses alone.
pub(crate) fn count_volumes(layout: &ClusterLayout) -> Result<CountedVolumes, CommandError> {
    let (answers, map_error) = ask::ask(layout)?;
    if let Some(error) = map_error {
        return Err(CommandError::operation(error));
    }
    let silent = |(node, answer): (&u32, &ask::NodeAnswer)| match &answer.answer {
        NodeReply::Report(_) | NodeReply::Stopped(_) => None,
        NodeReply::Unreported(_) | NodeReply::Silent(_) => Some(*node),
    };
    let silent = answers.iter().filter_map(silent).collect();
    let reports = answers.values().filter_map(|answer| match &answer.answer {
        NodeReply::Report(report) => Some(report),
        _ => None,
    });
    Ok(CountedVolumes { volumes: sum(reports), silent })
}

fn sum<'a>(reports: impl Iterator<Item = &'a Value>) -> BTreeMap<u64, VolumeCounts> {
    let mut volumes: BTreeMap<u64, VolumeCounts> = BTreeMap::new();
    for counted in reports.flat_map(|report| report["volumes"].as_array()).flatten() {
        // One without a number is several.
        let Some(volume) = counted["volume"].as_u64() else { continue };
        for (name, sum) in volumes.entry(volume).or_default().fields() {
            *sum = sum.saturating_add(counted[name].as_u64().unwrap_or(0));
        }
    }
    volumes
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn what_all_nodes_count_is_added_and_what_makes_no_sense_is_nothing() {
        let reports = [
            json!({ "volumes": [{ "volume": 7, "reads": 2, "read_bytes": 8192, "read_ns": 30 },
                                { "volume": null, "reads": 9 }] }),
            json!({ "volumes": [{ "volume": 7, "reads": 1, "writes": 4 }, { "volume": 9, "writes": "x" }] }),
            json!({ "volumes": 3 }),
            json!({}),
        ];
        let volumes = sum(reports.iter());
        let of_7 =
            VolumeCounts { reads: 3, read_bytes: 8192, read_ns: 30, writes: 4, ..VolumeCounts::default() };
        assert_eq!(volumes, [(7, of_7), (9, VolumeCounts::default())].into());
        let later = VolumeCounts { reads: 5, writes: 1, ..of_7 };
        let since = later.since(of_7);
        assert_eq!((since.reads, since.writes, since.read_bytes), (2, 0, 0));
    }
}
