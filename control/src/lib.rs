//! The control plane: registered modules with their methods, configuration, JSON-RPC, jobs and logging.
//!
//! A [`Module`] declares its methods, what it depends on, how it starts, saves, examines and stops. A
//! [`ControlPlane`] runs the modules in order and calls their methods, one update at a time. An [`RpcServer`]
//! offers them as JSON-RPC 2.0 on a UNIX socket, with SPDK's names, shapes and error codes; a [`ConfigFile`]
//! is a list of calls in SPDK's format. Parameters are declared with [`parameters!`]. A [`Keyring`] has the
//! secrets that methods name.
//!
//! ```
//! use control::{ByName, ControlPlane, Method, Module, RpcError};
//! struct Greeter;
//! impl Module for Greeter {
//!     const NAME: &'static str = "greeter";
//!     fn methods() -> Vec<Method<Greeter>> {
//!         vec![Method::query("greet", greet).text("Greets a caller", "the greeting")]
//!     }
//! }
//! fn greet(_: &Greeter, params: ByName) -> Result<String, RpcError> {
//!     Ok(format!("hello {}", params.name))
//! }
//! let plane = ControlPlane::builder(Vec::new()).module(&std::sync::Arc::new(Greeter)).start(None)?;
//! assert_eq!(plane.invoke("greet", control::json::json!({ "name": "Ada" }))?, "hello Ada");
//! # Ok::<(), RpcError>(())
//! ```
#![forbid(unsafe_code)]
#![cfg_attr(test, allow(clippy::unwrap_used))]

mod balancer;
mod compatibility;
mod config;
mod error;
mod examine;
pub mod files;
mod fixed_options;
mod framework;
mod jobs;
mod json_positions;
mod keyring;
pub mod logging;
mod method;
pub mod metrics;
mod module;
mod parameters;
mod plane;
mod processor;
pub mod reference;
mod reload;
mod rpc;
mod saved_calls;
mod scheduler;
mod sock;
mod used_bdevs;

pub use balancer::{BalancedTarget, Balancer, ConnectionLoad, ConnectionMove};
pub use compatibility::Compatibility;
pub use config::{ConfigError, ConfigFile};
pub use error::RpcError;
pub use examine::{Examination, Examiner};
pub use fixed_options::{FixedOptions, FixedSubsystem, FsdevOptions, IobufOptions};
pub use framework::{thread_name, tick_rate};
pub use jobs::{JobHandle, Jobs};
pub use json_positions::duplicate_key;
pub use keyring::{KEY_BYTES_MAX, Key, KeyError, Keyring, KeyringModule};
pub use method::{Catalog, Method, MethodInfo, MethodKind, StartupStage, spdk_methods};
pub use metrics::{HistogramSample, Metric, MetricKind, MetricSamples, MetricValue};
pub use module::Module;
pub use parameters::{
    ByName, DecodeLog, Decoder, NoParameters, Parameter, ParameterError, ParameterType, Parameters, Presence,
    TextOrNumber, field_name,
};
pub use plane::{ControlPlane, ControlPlaneBuilder, ManagedReactor};
pub use rpc::client;
pub use rpc::framing;
pub use rpc::server::RpcServer;
pub use rpc::socket::{ListenSocket, SocketError};
pub use saved_calls::{CallPlace, CallRecorder, SavedCalls};
pub use scheduler::SchedulerModule;
pub use serde_json as json;
pub use sock::SocketModule;
