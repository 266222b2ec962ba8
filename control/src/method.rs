//! Methods: what a module registers, and the catalog of what is registered.

use std::any::TypeId;
use std::collections::BTreeMap;
use std::sync::Arc;

use serde::Serialize;
use serde_json::{Map, Value, json};

use crate::jobs::JobHandle;
use crate::metrics::Metric;
use crate::parameters::{DecodeLog, Parameter, Parameters, Presence, decode};
use crate::{ControlPlane, Module, RpcError};

/// SPDK's RPC states. A method lists those in which it may be called.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum StartupStage {
    /// With `--wait-for-rpc`, until `framework_start_init`: options may be set.
    #[default]
    Startup,
    /// After start-up: all methods but those of start-up.
    Runtime,
}

/// What is known of a method without calling it.
#[derive(Clone, Debug)]
pub struct MethodInfo {
    /// Its name.
    pub name: &'static str,
    /// Name of the module that registers it.
    pub module: &'static str,
    /// The stages in which it may be called.
    pub stages: &'static [StartupStage],
    /// How it runs beside other methods.
    pub kind: MethodKind,
    /// What it does: one sentence, for the reference.
    pub text: &'static str,
    /// Its result in short.
    pub result: &'static str,
    /// Its own error codes, each with its cause.
    pub errors: &'static [(i64, &'static str)],
    /// Why it accepts only what is so anyway, if it does.
    pub default_only: Option<&'static str>,
    /// Parameters that the method assigns if a call leaves them to it, each as `outer.inner`: by their
    /// absence or their default, or with the value of `outer.inner=JSON`.
    pub assigned: &'static [&'static str],
    parameters: fn() -> Vec<Parameter>,
}

/// How a method runs beside other methods.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MethodKind {
    /// Changes nothing, and runs beside all others.
    Query,
    /// Changes state: updates run one at a time.
    Update,
    /// May take long: runs beside all others, reports its progress and can be cancelled.
    Job,
}

type Handler<M> = Box<dyn Fn(&Arc<M>, &ControlPlane, Value) -> Result<Value, RpcError> + Send + Sync>;

type Canonical<M> = Box<dyn Fn(&M, Value) -> Result<Map<String, Value>, RpcError> + Send + Sync>;

/// A method of the module `M`.
pub struct Method<M> {
    info: MethodInfo,
    handler: Handler<M>,
    /// The type of its parameters.
    parameters: TypeId,
    canonical: Canonical<M>,
}

type BoundHandler = Box<dyn Fn(&ControlPlane, Value) -> Result<Value, RpcError> + Send + Sync>;
type BoundCanonical = Box<dyn Fn(Value) -> Result<Map<String, Value>, RpcError> + Send + Sync>;

/// A method bound to its module.
pub(crate) struct BoundMethod {
    /// Calls it.
    pub(crate) call: BoundHandler,
    /// The parameters of a call in their canonical form.
    pub(crate) canonical: BoundCanonical,
}

fn result(value: impl Serialize) -> Result<Value, RpcError> {
    serde_json::to_value(value).map_err(RpcError::internal)
}

/// Decodes the parameters, and logs those without effect.
fn parse<P: Parameters>(method: &str, params: Value) -> Result<P, RpcError> {
    let mut log = DecodeLog::default();
    let params = decode(params, &mut log)?;
    log.write(method);
    Ok(params)
}

impl<M: Module> Method<M> {
    fn new<P: Parameters + 'static>(name: &'static str, kind: MethodKind, handler: Handler<M>) -> Method<M> {
        let info = MethodInfo {
            name,
            module: M::NAME,
            stages: &[StartupStage::Runtime],
            kind,
            text: "",
            result: "",
            errors: &[],
            default_only: None,
            assigned: &[],
            parameters: P::declaration,
        };
        let canonical: Canonical<M> = Box::new(move |_, params| Ok(decoded::<P>(kind, params)?.to_object()));
        Method { info, handler, parameters: TypeId::of::<P>(), canonical }
    }

    /// A method that changes nothing; it runs beside all others.
    pub fn query<P: Parameters + 'static, R: Serialize + 'static>(
        name: &'static str,
        run: fn(&M, P) -> Result<R, RpcError>,
    ) -> Method<M> {
        let handler: Handler<M> =
            Box::new(move |module, _, params| result(run(module, parse(name, params)?)?));
        Method::new::<P>(name, MethodKind::Query, handler)
    }

    /// A method that changes state. Updates run one at a time, so it must not wait for long.
    pub fn update<P: Parameters + 'static, R: Serialize + 'static>(
        name: &'static str,
        run: impl Fn(&M, P) -> Result<R, RpcError> + Send + Sync + 'static,
    ) -> Method<M> {
        let handler: Handler<M> = Box::new(move |module, plane, params| {
            let params = parse(name, params)?;
            let _guard = plane.lock_updates();
            result(run(module, params)?)
        });
        Method::new::<P>(name, MethodKind::Update, handler)
    }

    /// An update with a last part that may wait for what the update began, such as the end of I/O in flight,
    /// for a bounded time. Other updates wait for the first part only.
    pub fn concluded_update<P: Parameters + 'static, Q: 'static, R: Serialize + 'static>(
        name: &'static str,
        run: impl Fn(&M, P) -> Result<Q, RpcError> + Send + Sync + 'static,
        conclude: impl Fn(&M, Q) -> Result<R, RpcError> + Send + Sync + 'static,
    ) -> Method<M> {
        let handler: Handler<M> = Box::new(move |module, plane, params| {
            let params = parse(name, params)?;
            let guard = plane.lock_updates();
            let begun = run(module, params);
            drop(guard);
            result(conclude(module, begun?)?)
        });
        Method::new::<P>(name, MethodKind::Update, handler)
    }

    /// An update with a first part that may wait, as for a file. Only the second part keeps other updates waiting.
    pub fn prepared_update<P: Parameters + 'static, Q: 'static, R: Serialize + 'static>(
        name: &'static str,
        prepare: fn(&M, P) -> Result<Q, RpcError>,
        run: fn(&M, Q) -> Result<R, RpcError>,
    ) -> Method<M> {
        let handler: Handler<M> = Box::new(move |module, plane, params| {
            let params = parse(name, params)?;
            plane.wait_for_examinations();
            let prepared = prepare(module, params)?;
            let _guard = plane.lock_updates();
            result(run(module, prepared)?)
        });
        Method::new::<P>(name, MethodKind::Update, handler)
    }

    /// A method that may take long. It keeps no other method waiting, is listed by `job_get` while it runs, and
    /// can be cancelled. With the parameter `background` it answers at once with the job's handle.
    pub fn job<P: Parameters + Send + 'static, R: Serialize + 'static>(
        name: &'static str,
        run: fn(&M, P, &JobHandle) -> Result<R, RpcError>,
    ) -> Method<M> {
        let handler: Handler<M> = Box::new(move |module, plane, mut params| {
            let background = match params.as_object_mut().and_then(|object| object.remove("background")) {
                None | Some(Value::Bool(false)) => false,
                Some(Value::Bool(true)) => true,
                Some(_) => return Err(RpcError::invalid_params("background: expected a boolean")),
            };
            let params: P = parse(name, params)?;
            let module = module.clone();
            let run = move |job: &JobHandle| result(run(&module, params, job)?);
            if background {
                let id = plane.jobs().spawn(name, run)?;
                return Ok(json!({ "job": id }));
            }
            plane.jobs().run(name, run)
        });
        Method::new::<P>(name, MethodKind::Job, handler)
    }

    /// A method of the control plane itself.
    pub(crate) fn of_plane<P: Parameters + 'static, R: Serialize + 'static>(
        name: &'static str,
        run: fn(&ControlPlane, P) -> Result<R, RpcError>,
    ) -> Method<M> {
        let handler: Handler<M> = Box::new(move |_, plane, params| result(run(plane, parse(name, params)?)?));
        Method::new::<P>(name, MethodKind::Query, handler)
    }

    /// A method of SPDK that sets what is fixed here, for `reason`. It succeeds without effect with the parameters
    /// that `P` accepts, and rejects a value that asks for something else.
    pub fn default_only<P: Parameters + 'static>(name: &'static str, reason: &'static str) -> Method<M> {
        let handler: Handler<M> = Box::new(move |_, _, params| {
            decode::<P>(params, &mut DecodeLog::default())?;
            log::info!(target: "rpc", "{name} changes nothing: {reason}");
            Ok(Value::Bool(true))
        });
        let mut method = Method::new::<P>(name, MethodKind::Query, handler).at_any_stage();
        method.info.default_only = Some(reason);
        method
    }

    /// For the reference: what it sets is stored, and has no effect for `reason`.
    pub fn without_effect(mut self, reason: &'static str) -> Method<M> {
        self.info.default_only = Some(reason);
        self
    }

    /// Says what it does and what it returns, for the reference.
    pub fn text(mut self, text: &'static str, result: &'static str) -> Method<M> {
        (self.info.text, self.info.result) = (text, result);
        self
    }

    /// Its error codes beyond those of every method, for the reference.
    pub fn errors(mut self, errors: &'static [(i64, &'static str)]) -> Method<M> {
        self.info.errors = errors;
        self
    }

    /// Gives equal calls equal parameters, beyond what the declaration of their type does: spellings of
    /// addresses, names of devices, values that depend on others. `P` is the type of the method's parameters.
    /// Fails if the method would reject them whatever exists. Neither changes anything nor waits.
    pub fn canonical<P: Parameters + 'static>(
        mut self,
        change: fn(&M, &mut P) -> Result<(), RpcError>,
    ) -> Method<M> {
        assert!(self.parameters == TypeId::of::<P>(), "{} has parameters of another type", self.info.name);
        let kind = self.info.kind;
        self.canonical = Box::new(move |module, params| {
            let mut params: P = decoded(kind, params)?;
            change(module, &mut params)?;
            Ok(params.to_object())
        });
        self
    }

    /// Names parameters that it assigns if a call leaves them to it ([`MethodInfo::assigned`]).
    pub fn assigns(mut self, parameters: &'static [&'static str]) -> Method<M> {
        self.info.assigned = parameters;
        self
    }

    /// It may be called during start-up too.
    pub fn at_any_stage(mut self) -> Method<M> {
        self.info.stages = &[StartupStage::Startup, StartupStage::Runtime];
        self
    }

    /// It may be called during start-up only.
    pub(crate) fn at_startup(mut self) -> Method<M> {
        self.info.stages = &[StartupStage::Startup];
        self
    }

    pub(crate) fn bind(self, module: &Arc<M>) -> BoundMethod {
        let (called, handler) = (module.clone(), self.handler);
        let (asked, canonical) = (module.clone(), self.canonical);
        BoundMethod {
            call: Box::new(move |plane, params| handler(&called, plane, params)),
            canonical: Box::new(move |params| canonical(&asked, params)),
        }
    }
}

/// Decodes the parameters of a call for comparison: neither logs nor knows how a job is run.
fn decoded<P: Parameters>(kind: MethodKind, mut params: Value) -> Result<P, RpcError> {
    if kind == MethodKind::Job
        && let Some(object) = params.as_object_mut()
    {
        object.remove("background");
    }
    decode(params, &mut DecodeLog::default())
}

impl MethodInfo {
    /// Its parameters, in the order of their declaration.
    pub fn parameters(&self) -> Vec<Parameter> {
        let mut parameters = (self.parameters)();
        if self.kind == MethodKind::Job {
            parameters.push(Parameter {
                name: "background",
                kind: "boolean".to_string(),
                unit: None,
                presence: Presence::Default(Value::Bool(false)),
                text: "Answer at once with `{\"job\": N}`, for `job_get` and `job_cancel`; not an SPDK parameter".to_string(),
                members: Vec::new(),
            });
        }
        parameters
    }
}

/// The methods and metrics of modules, by name; what they are can be asked before any module is started.
#[derive(Clone, Debug, Default)]
pub struct Catalog {
    methods: BTreeMap<&'static str, MethodInfo>,
    metrics: BTreeMap<&'static str, &'static Metric>,
}

/// SPDK's methods, one a line: an error distinguishes an unsupported method from an unknown one.
const SPDK_METHODS: &str = include_str!("spdk-26.09.txt");

/// The names of SPDK's methods, as of version 26.09.
pub fn spdk_methods() -> impl Iterator<Item = &'static str> {
    SPDK_METHODS.lines()
}

impl Catalog {
    /// The control plane's own methods.
    pub fn new() -> Catalog {
        Catalog::default().with::<crate::framework::Framework>()
    }

    /// Adds the methods and metrics of a module.
    pub fn with<M: Module>(mut self) -> Catalog {
        for method in M::methods() {
            let previous = self.methods.insert(method.info.name, method.info);
            assert!(previous.is_none(), "two methods are called {}", previous.map_or("", |info| info.name));
        }
        for metric in M::metrics() {
            let known = self.metrics.entry(metric.name).or_insert(metric);
            assert!(std::ptr::eq(*known, metric), "two metrics are called {}", metric.name);
        }
        self
    }

    /// A method.
    pub fn get(&self, name: &str) -> Option<&MethodInfo> {
        self.methods.get(name)
    }

    /// All methods, sorted by name.
    pub fn iter(&self) -> impl Iterator<Item = &MethodInfo> {
        self.methods.values()
    }

    /// All metrics, sorted by name.
    pub fn metrics(&self) -> impl Iterator<Item = &'static Metric> {
        self.metrics.values().copied()
    }

    /// Names of the methods that may be called in `stage`; of all methods without one.
    pub fn names(&self, stage: Option<StartupStage>) -> Vec<&'static str> {
        let callable = |info: &&MethodInfo| stage.is_none_or(|stage| info.stages.contains(&stage));
        self.iter().filter(callable).map(|info| info.name).collect()
    }

    /// The error for a method that is not in the catalog.
    pub fn not_found(name: &str) -> RpcError {
        let message = if spdk_methods().any(|known| known == name) {
            format!("{name} is an SPDK method that Ringbolt lacks (rpc_get_methods lists the others)")
        } else {
            format!("no method is called {name}")
        };
        RpcError::new(RpcError::METHOD_NOT_FOUND, message)
    }
}

impl<M: Module> Method<M> {
    pub(crate) fn name(&self) -> &'static str {
        self.info.name
    }
}
