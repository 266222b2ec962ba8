//! Which part of the storage stack a function belongs to.

use serde::Deserialize;

/// The table that comes with the program.
const BUILT_IN: &str = include_str!("symbols.toml");

/// The class of what belongs to no part that is named.
const KERNEL: &str = "kernel";
/// The class of the generator's own code.
const GENERATOR: &str = "generator";

/// Functions by class, in the order in which they are asked.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Classes {
    class: Vec<Class>,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Class {
    name: String,
    #[serde(default)]
    leaf: bool,
    #[serde(default)]
    exact: Vec<String>,
    #[serde(default)]
    prefix: Vec<String>,
}

impl Class {
    fn knows(&self, function: &str) -> bool {
        // What the compiler adds to the names of copies that it makes.
        let plain = function.split('.').next().unwrap_or(function);
        self.exact.iter().any(|name| name == plain)
            || self.prefix.iter().any(|start| plain.starts_with(start.as_str()))
    }
}

impl Classes {
    /// The table that comes with the program.
    pub fn built_in() -> Classes {
        Classes::parse(BUILT_IN).unwrap_or_else(|error| panic!("the table comes with the program: {error}"))
    }

    /// Another table.
    ///
    /// # Errors
    /// A sentence that says what is wrong with it.
    pub fn parse(text: &str) -> Result<Classes, String> {
        toml::from_str(text).map_err(|error| error.to_string())
    }

    /// The names of all classes.
    pub fn names(&self) -> Vec<&str> {
        let named = self.class.iter().map(|class| class.name.as_str());
        [GENERATOR, KERNEL].into_iter().chain(named).collect()
    }

    /// The class of a sample: the kernel's functions from the innermost outwards. `user` says that the
    /// processor was outside of the kernel.
    pub fn of(&self, functions: &[&str], user: bool) -> &str {
        if user {
            return GENERATOR;
        }
        for (depth, function) in functions.iter().enumerate() {
            let asked = self.class.iter().filter(|class| !class.leaf || depth == 0);
            if let Some(class) = asked.into_iter().find(|class| class.knows(function)) {
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
    fn functions_are_put_where_the_studies_put_them() {
        let classes = Classes::built_in();
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
            assert_eq!(classes.of(functions, false), class, "{functions:?}");
        }
        assert_eq!(classes.of(&["nvme_queue_rq"], true), "generator");
        assert_eq!(classes.names().len(), 8);
    }

    #[test]
    fn the_lock_functions_are_those_of_the_published_script() {
        let classes = Classes::built_in();
        let locks = classes.class.iter().find(|class| class.name == "locks").unwrap();
        assert_eq!((locks.exact.len(), locks.prefix.len(), locks.leaf), (8, 0, true));
    }

    #[test]
    fn a_wrong_table_is_refused() {
        assert!(Classes::parse("class = 3").is_err());
        assert!(Classes::parse("[[class]]\nnames = 'x'").is_err());
    }
}
