//! The references of all methods (docs/RPC.md) and of what has no effect (docs/PARAMETERS.md), generated from
//! their declarations.

use std::fmt::Write;

use crate::parameters::{Parameter, Presence};
use crate::{Catalog, MethodInfo, MethodKind, StartupStage, spdk_methods};

mod fixed;

pub use fixed::without_effect;

const HEAD: &str = "\
# JSON-RPC methods
This page is generated from the declarations of the methods; to change it, change them and run

```
cargo run -p ringbolt -- rpc-reference > docs/RPC.md
```

Requests are JSON-RPC 2.0 on the UNIX socket of `ringbolt serve`: at most 1 MiB, 32 levels and 131,072 values each,
alone or in batches. Names, parameters, results and error codes are SPDK's, so that its `rpc.py` works too.
A method that changes state (*update*) waits for other updates. A *job* may take long: it keeps no other method
waiting, `job_get` shows its progress, and `job_cancel` ends it with -125. Calls of a connection start in the order in which
they arrive, at most 16 at once; one that takes longer than 20 ms keeps no later one waiting, and is answered after those.

| code | meaning, for every method |
| --- | --- |
| -32700, -32600 | the request is not JSON, exceeds a limit, or is not JSON-RPC |
| -32601 | no method has that name |
| -32602 | a parameter is missing, unknown or invalid; the message names it |
| -32603 | a failure without a code of its own |
| -1 | the method may not be called at this stage |
| other negative numbers | errno of Linux |

";

/// The reference in Markdown: every method of the catalog, and the state of each of SPDK's.
pub fn markdown(catalog: &Catalog) -> String {
    let mut text = HEAD.to_string();
    for info in catalog.iter() {
        method(&mut text, info);
    }
    spdk(&mut text, catalog);
    text
}

/// Writing to a string cannot fail.
macro_rules! push {
    ($text:expr, $($line:tt)*) => {{
        let _ = writeln!($text, $($line)*);
    }};
}

fn method(text: &mut String, info: &MethodInfo) {
    push!(text, "## {}", info.name);
    let kind = match info.kind {
        MethodKind::Query => "Query",
        MethodKind::Update => "Update",
        MethodKind::Job => "Job",
    };
    let stage = match info.stages {
        [StartupStage::Runtime] => "",
        [StartupStage::Startup] => ", only during start-up",
        _ => ", during start-up too",
    };
    match info.default_only {
        Some(reason) => push!(text, "Default only: {reason}. *Module `{}`.*\n", info.module),
        None => push!(text, "{} *{kind}{stage}; module `{}`.*\n", info.text, info.module),
    }
    let parameters = info.parameters();
    if !parameters.is_empty() {
        push!(text, "| parameter | type | default | |");
        push!(text, "| --- | --- | --- | --- |");
        rows(text, "", &parameters);
        push!(text, "");
    }
    push!(text, "Result: {}.\n", if info.default_only.is_some() { "true" } else { info.result });
    if !info.errors.is_empty() {
        let errors = info.errors.iter().map(|(code, cause)| format!("{code} {cause}"));
        push!(text, "Errors: {}.\n", errors.collect::<Vec<_>>().join("; "));
    }
}

fn rows(text: &mut String, outer: &str, parameters: &[Parameter]) {
    let is_plain = |one: &&Parameter| !matches!(one.presence, Presence::Only(_) | Presence::Ignored(_));
    for one in parameters.iter().filter(is_plain) {
        let default = match &one.presence {
            Presence::Required => "required".to_string(),
            Presence::Default(value) if !value.is_null() => format!("`{value}`"),
            _ => String::new(),
        };
        let unit = one.unit.map_or(String::new(), |unit| format!(" ({unit})"));
        let name = format!("{outer}{}", one.name);
        push!(text, "| `{name}` | {}{unit} | {default} | {} |", one.kind, one.text);
        rows(text, &format!("{name}."), &one.members);
    }
    let only = parameters.iter().filter_map(|one| match &one.presence {
        Presence::Only(values) => {
            let values: Vec<String> = values.iter().map(|value| format!("`{value}`")).collect();
            Some(format!("`{outer}{}` {}", one.name, values.join(" or ")))
        }
        _ => None,
    });
    let only: Vec<String> = only.collect();
    if !only.is_empty() {
        push!(text, "| accepted, without effect | | | {} |", only.join(", "));
    }
    let mut reasons: Vec<&str> = Vec::new();
    for one in parameters {
        if let Presence::Ignored(reason) = &one.presence
            && !reasons.contains(reason)
        {
            reasons.push(reason);
        }
    }
    for reason in reasons {
        let of_reason = parameters.iter().filter(|one| one.presence == Presence::Ignored(reason));
        let names: Vec<String> = of_reason.map(|one| format!("`{outer}{}`", one.name)).collect();
        push!(text, "| without effect | any | | {}: {reason} |", names.join(", "));
    }
}

/// What became of each of SPDK's methods.
fn spdk(text: &mut String, catalog: &Catalog) {
    let total = spdk_methods().count();
    let state = |name: &str| catalog.get(name).map(|info| info.default_only);
    let done = spdk_methods().filter(|name| state(name) == Some(None)).count();
    let idle = spdk_methods().filter(|name| matches!(state(name), Some(Some(_)))).count();
    push!(text, "## SPDK's methods");
    push!(
        text,
        "Of SPDK's {total} methods (version 26.09) {done} are done and {idle} are *default only*: they accept what is \
         so anyway, because Ringbolt has one fixed behaviour there, and reject other values. {} are not there; calling \
         one fails with -32601.\n",
        total - done - idle
    );
    push!(text, "| method | state |");
    push!(text, "| --- | --- |");
    for name in spdk_methods() {
        match state(name) {
            None => push!(text, "| `{name}` | not there |"),
            Some(None) => push!(text, "| [`{name}`](#{name}) | done |"),
            Some(Some(reason)) => push!(text, "| [`{name}`](#{name}) | default only: {reason} |"),
        }
    }
}
