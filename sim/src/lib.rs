//! Whole systems in virtual time: nodes with several cores, links that delay and lose, disks that lose power.
//!
//! The code that runs is the product's: reactors, the NVMe/TCP driver with multipath, the NVMe-oF target, the
//! block layer. What they get from their cores is replaced: a virtual clock, seeded random numbers, and links
//! instead of sockets. A [`World`] runs all nodes on one thread in an order that the seed decides, and an
//! [`Oracle`] knows which contents each block may have. Replicas of the store have no reactor yet: their
//! scenario has nodes, links and disks of its own, and checks that what clients saw is linearizable.
//! [`scenario`] names the scenarios and their faults; `ringbolt-sim` runs them by the thousand, and prints
//! the seed of each failure.
//!
//! ```
//! use sim::{FabricOptions, World};
//! let world = World::new(7, FabricOptions::default());
//! let node = world.add_node();
//! let handles = world.boot(node, 2);
//! assert_eq!(handles[1].call(|core| core.index()), Ok(1));
//! world.end();
//! ```
#![forbid(unsafe_code)]
#![cfg_attr(test, allow(clippy::unwrap_used))]

mod early_disk;
mod fabric;
mod oracle;
mod replicas;
pub mod scenario;
mod workload;
mod world;

pub use early_disk::EarlyDisk;
pub use fabric::{FabricOptions, LinkConfig, LinkStream, NodeId, SimulatedLinks, node_address};
pub use oracle::{Oracle, Violation};
pub use workload::{SimWorkload, WorkloadConfig};
pub use world::World;
