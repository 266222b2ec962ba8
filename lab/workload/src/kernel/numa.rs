//! The NUMA nodes of the machine: `/sys/devices/system/node`.

use std::path::Path;

use os::{CpuSet, MemoryPolicy};

use crate::run::RunError;

/// The nodes that are online, with their cores.
#[derive(Debug)]
pub(super) struct NumaNodes(Vec<(u32, Vec<u32>)>);

impl NumaNodes {
    pub(super) fn of_machine() -> Result<NumaNodes, RunError> {
        NumaNodes::read(Path::new("/sys/devices/system/node"))
    }

    fn read(directory: &Path) -> Result<NumaNodes, RunError> {
        let text = |path: &Path| {
            std::fs::read_to_string(path)
                .map_err(|error| RunError::Machine { what: path.display().to_string(), error })
        };
        // Lists of nodes have the format of lists of cores.
        let list = |text: String| text.trim().parse::<CpuSet>().map_or(Vec::new(), |set| set.cpus().to_vec());
        let mut nodes = Vec::new();
        for node in list(text(&directory.join("online"))?) {
            // A node without cores has an empty list.
            nodes.push((node, list(text(&directory.join(format!("node{node}/cpulist")))?)));
        }
        Ok(NumaNodes(nodes))
    }

    fn check(&self, option: &str, nodes: &[u32]) -> Result<(), RunError> {
        let is_online = |node: &u32| self.0.iter().any(|(known, _)| known == node);
        let Some(missing) = nodes.iter().find(|node| !is_online(node)) else { return Ok(()) };
        let known: Vec<String> = self.0.iter().map(|(node, _)| node.to_string()).collect();
        let known = known.join(", ");
        Err(RunError::Options(format!("--{option}: node {missing} is not among the machine's: {known}")))
    }

    /// The cores of these nodes; of all, if none is given.
    pub(super) fn cpus(&self, option: &str, nodes: &[u32]) -> Result<Vec<u32>, RunError> {
        self.check(option, nodes)?;
        let selected = self.0.iter().filter(|(node, _)| nodes.is_empty() || nodes.contains(node));
        Ok(selected.flat_map(|(_, cpus)| cpus.clone()).collect())
    }

    /// The policy with all nodes where it names none.
    pub(super) fn resolved(&self, policy: &MemoryPolicy) -> Result<MemoryPolicy, RunError> {
        let all = |nodes: &[u32]| match nodes {
            [] => self.0.iter().map(|(node, _)| *node).collect(),
            nodes => nodes.to_vec(),
        };
        let resolved = match policy {
            MemoryPolicy::Bind(nodes) => MemoryPolicy::Bind(all(nodes)),
            MemoryPolicy::Interleave(nodes) => MemoryPolicy::Interleave(all(nodes)),
            other => other.clone(),
        };
        match &resolved {
            MemoryPolicy::Bind(nodes) | MemoryPolicy::Interleave(nodes) => {
                self.check("numa_mem_policy", nodes)?
            }
            MemoryPolicy::Preferred(node) => self.check("numa_mem_policy", &[*node])?,
            MemoryPolicy::Default | MemoryPolicy::Local => {}
        }
        Ok(resolved)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nodes_have_cores_and_missing_ones_are_named() {
        let directory = std::env::temp_dir().join(format!("ringbolt-numa-{}", std::process::id()));
        for (name, text) in [("online", "0,2-3\n"), ("node0/cpulist", "0-1\n"), ("node2/cpulist", "4\n")] {
            std::fs::create_dir_all(directory.join(name).parent().unwrap()).unwrap();
            std::fs::write(directory.join(name), text).unwrap();
        }
        assert!(NumaNodes::read(&directory).unwrap_err().to_string().contains("node3/cpulist"));
        std::fs::create_dir_all(directory.join("node3")).unwrap();
        std::fs::write(directory.join("node3/cpulist"), "\n").unwrap();
        let nodes = NumaNodes::read(&directory).unwrap();
        assert_eq!(nodes.cpus("x", &[2, 3]).unwrap(), [4]);
        assert_eq!(nodes.cpus("x", &[]).unwrap(), [0, 1, 4]);
        let error = nodes.cpus("numa_cpu_nodes", &[0, 1]).unwrap_err();
        assert!(error.to_string().contains("--numa_cpu_nodes: node 1 is not among the machine's: 0, 2, 3"));
        assert_eq!(nodes.resolved(&MemoryPolicy::Bind(vec![])).unwrap(), MemoryPolicy::Bind(vec![0, 2, 3]));
        assert!(nodes.resolved(&MemoryPolicy::Preferred(9)).is_err());
        assert_eq!(nodes.resolved(&MemoryPolicy::Local).unwrap(), MemoryPolicy::Local);
        std::fs::remove_dir_all(directory).unwrap();
    }
}
