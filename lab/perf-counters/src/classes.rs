//! Classification of kernel functions by part of the storage stack.

use serde::Deserialize;

/// The built-in table.
const BUILT_IN: &str = include_str!("symbols.toml");

/// The class of samples that match no other class.
const KERNEL: &str = "kernel";
/// The class of samples in user mode: the load generator.
const GENERATOR: &str = "generator";

/// Classes of kernel functions, in order of priority.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SymbolClasses {
    class: Vec<SymbolClass>,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct SymbolClass {
    name: String,
    #[serde(default)]
    leaf: bool,
    #[serde(default)]
    exact: Vec<String>,
    #[serde(default)]
    prefix: Vec<String>,
}

impl SymbolClass {
    fn matches(&self, function: &str) -> bool {
        // Without suffixes that the compiler adds to clones, such as `.constprop.0`.
        let base_name = function.split('.').next().unwrap_or(function);
        self.exact.iter().any(|name| name == base_name)
            || self.prefix.iter().any(|start| base_name.starts_with(start.as_str()))
    }
}

impl SymbolClasses {
    /// The built-in table.
    pub fn built_in() -> SymbolClasses {
        SymbolClasses::parse(BUILT_IN)
            .unwrap_or_else(|error| panic!("the built-in table is invalid: {error}"))
    }

    /// Parses a table in TOML.
    ///
    /// # Errors
    /// A message that describes the problem.
    pub fn parse(text: &str) -> Result<SymbolClasses, String> {
        toml::from_str(text).map_err(|error| error.to_string())
    }

    /// The names of all classes, including `generator` and `kernel`.
    pub fn names(&self) -> Vec<&str> {
        let named = self.class.iter().map(|class| class.name.as_str());
        [GENERATOR, KERNEL].into_iter().chain(named).collect()
    }

    /// The class of a sample, from its kernel functions, innermost first. `user`: the CPU was in user mode.
    pub fn classify(&self, functions: &[&str], user: bool) -> &str {
        if user {
            return GENERATOR;
        }
        for (depth, function) in functions.iter().enumerate() {
            let candidates = self.class.iter().filter(|class| !class.leaf || depth == 0);
            if let Some(class) = candidates.into_iter().find(|class| class.matches(function)) {
                return &class.name;
            }
        }
        KERNEL
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn functions_are_classified_as_in_the_published_studies() {
        let classes = SymbolClasses::built_in();
        for (functions, class) in [
            (&["native_queued_spin_lock_slowpath", "_raw_spin_lock", "dd_insert_requests"][..], "locks"),
            (&["_raw_spin_unlock_irqrestore", "blk_mq_insert_requests"], "block_layer"),
            (&["dd_dispatch_request", "__blk_mq_do_dispatch_sched"], "scheduler"),
            (&["bfq_dispatch_request.constprop.0"], "scheduler"),
            (&["nvme_queue_rq", "blk_mq_dispatch_rq_list"], "driver"),
            (&["io_submit_sqes", "__do_sys_io_uring_enter"], "io_library"),
            (&["memcpy", "blkdev_direct_IO"], "block_layer"),
            (&["clear_page_erms", "handle_mm_fault"], "kernel"),
            (&["pv_native_safe_halt", "default_idle", "do_idle"], "idle"),
            (&[], "kernel"),
        ] {
            assert_eq!(classes.classify(functions, false), class, "{functions:?}");
        }
        assert_eq!(classes.classify(&["nvme_queue_rq"], true), "generator");
        assert_eq!(classes.names().len(), 8);
    }

    #[test]
    fn the_lock_functions_match_the_published_script() {
        let classes = SymbolClasses::built_in();
        let locks = classes.class.iter().find(|class| class.name == "locks").unwrap();
        assert_eq!((locks.exact.len(), locks.prefix.len(), locks.leaf), (8, 0, true));
    }

    #[test]
    fn an_invalid_table_is_rejected() {
        assert!(SymbolClasses::parse("class = 3").is_err());
        assert!(SymbolClasses::parse("[[class]]\nnames = 'x'").is_err());
    }
}
