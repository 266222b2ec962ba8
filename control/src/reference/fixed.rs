//! The parameters that have no effect (docs/PARAMETERS.md), generated from the declarations of the methods.

use std::fmt::Write;

use crate::parameters::{Parameter, Presence};
use crate::{Catalog, MethodInfo};

const HEAD: &str = "\
# Parameters without effect
This page is generated from the declarations of the methods; to change it, change them and run

```
cargo run -p ringbolt -- rpc-reference --without-effect > docs/PARAMETERS.md
```

Ringbolt has SPDK's parameters, also where it has one fixed behaviour. What a method does with a parameter
follows from its declaration:

- **Declared with an effect**: listed in [RPC.md](RPC.md) with its type, range and default, and not on this page.
- **Fixed**: the listed values ask for what is so anyway, and are accepted. Any other value is rejected with
  -32602; the message names the parameter, the reason and the accepted values. A parameter that is absent or
  null is not checked.
- **Ignored**: every value is accepted. A value other than null, false and 0 is logged, with the reason.
- **Not declared**: rejected with -32602; the message lists the parameters that there are.

";

/// Every parameter without effect, and every method that accepts only what is so anyway, in Markdown.
pub fn without_effect(catalog: &Catalog) -> String {
    let mut text = HEAD.to_string();
    section(&mut text, "Fixed", "| method | accepted | reason |", catalog, fixed_rows);
    section(&mut text, "Ignored", "| method | parameters | reason |", catalog, ignored_rows);
    section(&mut text, "Methods without effect", "| method | parameters | reason |", catalog, default_only);
    text
}

type Rows = fn(&MethodInfo, &[(String, Parameter)]) -> Vec<[String; 2]>;

/// A table with the rows of each method.
fn section(text: &mut String, title: &str, head: &str, catalog: &Catalog, rows: Rows) {
    let mut lines = String::new();
    for info in catalog.iter() {
        let mut parameters = Vec::new();
        flatten(&mut parameters, "", info.parameters());
        for [what, why] in rows(info, &parameters) {
            let _ = writeln!(lines, "| [`{0}`](RPC.md#{0}) | {what} | {why} |", info.name);
        }
    }
    let _ = write!(text, "## {title}\n{head}\n| --- | --- | --- |\n{lines}\n");
}

/// Parameters and the members of those that are objects, each with its whole name.
fn flatten(all: &mut Vec<(String, Parameter)>, outer: &str, parameters: Vec<Parameter>) {
    for mut one in parameters {
        let name = format!("{outer}{}", one.name);
        let members = std::mem::take(&mut one.members);
        all.push((name.clone(), one));
        flatten(all, &format!("{name}."), members);
    }
}

fn fixed_rows(_: &MethodInfo, parameters: &[(String, Parameter)]) -> Vec<[String; 2]> {
    let row = |(name, one): &(String, Parameter)| match &one.presence {
        Presence::Only(values) => {
            let values: Vec<String> = values.iter().map(|value| format!("`{value}`")).collect();
            Some([format!("`{name}` {}", values.join(" or ")), one.text.clone()])
        }
        _ => None,
    };
    by_reason(parameters.iter().filter_map(row))
}

/// Joins the rows that have the same reason.
fn by_reason(all: impl Iterator<Item = [String; 2]>) -> Vec<[String; 2]> {
    let mut rows: Vec<[String; 2]> = Vec::new();
    for [what, reason] in all {
        match rows.iter_mut().find(|[_, of_row]| *of_row == reason) {
            Some([whats, _]) => {
                let _ = write!(whats, ", {what}");
            }
            None => rows.push([what, reason]),
        }
    }
    rows
}

fn ignored_rows(_: &MethodInfo, parameters: &[(String, Parameter)]) -> Vec<[String; 2]> {
    let row = |(name, one): &(String, Parameter)| match one.presence {
        Presence::Ignored(reason) => Some([format!("`{name}`"), reason.to_string()]),
        _ => None,
    };
    by_reason(parameters.iter().filter_map(row))
}

fn default_only(info: &MethodInfo, parameters: &[(String, Parameter)]) -> Vec<[String; 2]> {
    let names: Vec<String> = parameters.iter().map(|(name, _)| format!("`{name}`")).collect();
    info.default_only.map(|reason| [names.join(", "), reason.to_string()]).into_iter().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    crate::parameters! {
        /// Of the test.
        struct Inner {
            /// Size
            size: u32 = 1,
        }
        only("it is a ball") { shape: String = "round".to_string() }
    }

    crate::parameters! {
        /// Of the test.
        struct Outer {
            /// Name
            name: String,
            /// Member
            inner: Option<Inner>,
        }
        only("it is not limited") { limit: u32 = 0 }
        ignored("there is one pool") { pool, cache }
        ignored("it is not counted") { count }
    }

    #[test]
    fn fixed_and_ignored_parameters_are_listed_with_the_names_of_their_objects() {
        let mut parameters = Vec::new();
        flatten(&mut parameters, "", <Outer as crate::Parameters>::declaration());
        let of_presence = |only: bool| -> Vec<&str> {
            let listed = parameters.iter().filter(|(_, one)| match one.presence {
                Presence::Only(_) => only,
                Presence::Ignored(_) => !only,
                _ => false,
            });
            listed.map(|(name, _)| name.as_str()).collect()
        };
        assert_eq!(of_presence(true), ["inner.shape", "limit"]);
        assert_eq!(of_presence(false), ["pool", "cache", "count"]);
    }
}
