//! The method table: one for the RPC server and for configuration files.
//!
//! A method has a name, typed parameters of which unknown ones are refused, a handler and a result.
//! Names, parameters, results and error codes are SPDK's.

use std::collections::BTreeMap;

use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

use crate::rpc::RpcError;
use crate::state::App;

mod bdev;
mod bdev_nvme;
mod devices;
mod framework;
mod histogram;
mod ignored;
mod iostat;
mod model;
mod nvmf;
mod parameters;

pub(crate) use bdev_nvme::{NvmeOptions, exists as nvme_exists, health_json};
pub(crate) use histogram::HistogramStart;
pub(crate) use nvmf::calls as nvmf_calls;

/// The subsystems of a configuration, in the order in which they start, and what each stands on.
pub(crate) const SUBSYSTEMS: [(&str, &[&str]); 2] = [("bdev", &[]), ("nvmf", &["bdev"])];

/// The methods that SPDK has, so that what is missing can be told from what never was.
const SPDK_METHODS: &str = include_str!("methods/spdk-26.09.txt");

/// How far start-up is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Stage {
    /// `--wait-for-rpc`: options may be set.
    #[default]
    Startup,
    /// Everything else.
    Runtime,
}

type Handler = Box<dyn Fn(&App, Value) -> Result<Value, RpcError> + Send + Sync>;

/// One method.
pub(crate) struct Method {
    handler: Handler,
    stages: &'static [Stage],
    changes: bool,
}

/// Every method, by name.
pub(crate) struct Table(BTreeMap<&'static str, Method>);

impl Method {
    pub(crate) fn callable_in(&self, stage: Stage) -> bool {
        self.stages.contains(&stage)
    }

    /// Whether it changes something, so that only one may run at a time.
    pub(crate) fn changes(&self) -> bool {
        self.changes
    }

    pub(crate) fn call(&self, app: &App, params: Value) -> Result<Value, RpcError> {
        (self.handler)(app, params)
    }
}

impl Table {
    pub(crate) fn get(&self, name: &str) -> Option<&Method> {
        self.0.get(name)
    }

    /// Names of the methods that may be called in `stage`, or of all.
    pub(crate) fn names(&self, stage: Option<Stage>) -> Vec<&'static str> {
        let callable = |method: &Method| stage.is_none_or(|stage| method.callable_in(stage));
        self.0.iter().filter(|(_, method)| callable(method)).map(|(name, _)| *name).collect()
    }

    /// A method that only looks.
    fn read<P: DeserializeOwned + 'static, R: Serialize + 'static>(
        &mut self,
        name: &'static str,
        handler: fn(&App, P) -> Result<R, RpcError>,
    ) {
        self.add(name, &[Stage::Runtime], false, handler);
    }

    /// A method that changes something.
    fn change<P: DeserializeOwned + 'static, R: Serialize + 'static>(
        &mut self,
        name: &'static str,
        handler: fn(&App, P) -> Result<R, RpcError>,
    ) {
        self.add(name, &[Stage::Runtime], true, handler);
    }

    fn add<P: DeserializeOwned + 'static, R: Serialize + 'static>(
        &mut self,
        name: &'static str,
        stages: &'static [Stage],
        changes: bool,
        handler: fn(&App, P) -> Result<R, RpcError>,
    ) {
        let handler = move |app: &App, params: Value| {
            let result = handler(app, parse(params)?)?;
            serde_json::to_value(result).map_err(RpcError::internal)
        };
        self.insert(name, Method { handler: Box::new(handler), stages, changes });
    }

    fn insert(&mut self, name: &'static str, method: Method) {
        let before = self.0.insert(name, method);
        assert!(before.is_none(), "two methods are called {name}");
    }
}

/// Builds the table.
pub(crate) fn table() -> Table {
    let mut table = Table(BTreeMap::new());
    framework::add(&mut table);
    bdev::add(&mut table);
    bdev_nvme::add(&mut table);
    devices::add(&mut table);
    model::add(&mut table);
    iostat::add(&mut table);
    histogram::add(&mut table);
    nvmf::add(&mut table);
    ignored::add(&mut table);
    table
}

/// What a caller is told of a method that is not in the table.
pub(crate) fn not_found(name: &str) -> RpcError {
    let message = if SPDK_METHODS.lines().any(|known| known == name) {
        format!("{name} is SPDK's and not in Ringbolt (rpc_get_methods lists what is)")
    } else {
        format!("no method is called {name}")
    };
    RpcError::new(RpcError::METHOD_NOT_FOUND, message)
}

/// No parameters at all are the same as none of them.
fn parse<P: DeserializeOwned>(params: Value) -> Result<P, RpcError> {
    let params = match params {
        Value::Null => Value::Object(Map::new()),
        Value::Array(_) => return Err(RpcError::invalid_params("they are to be an object, by name")),
        params => params,
    };
    serde_json::from_value(params).map_err(RpcError::invalid_params)
}

#[cfg(test)]
mod tests;
