//! Parameters, each declared once with [`parameters!`](crate::parameters): name, type, unit, default and
//! text.
//!
//! The declaration is the only place: decoding and its errors, the rejection of what is unknown or not
//! supported, the references (docs/RPC.md, docs/PARAMETERS.md) and what `save_config` writes follow from it.

use secret::Secret;
use serde_json::{Map, Value};
use uuid::Uuid;

use crate::RpcError;

/// One declared parameter, for the reference.
#[derive(Clone, Debug)]
pub struct Parameter {
    /// Name, as in the JSON object.
    pub name: &'static str,
    /// Type and range of values.
    pub kind: String,
    /// Unit of a number.
    pub unit: Option<&'static str>,
    /// Whether it may be absent, and what absence means.
    pub presence: Presence,
    /// What it means: one or more sentences.
    pub text: String,
    /// Parameters within an object.
    pub members: Vec<Parameter>,
}

impl Parameter {
    /// A parameter of which only these values are accepted, for `reason`.
    pub fn only<T: ParameterType>(name: &'static str, accepted: &[T], reason: &str) -> Parameter {
        Parameter {
            name,
            kind: T::kind(),
            unit: None,
            presence: Presence::Only(accepted.iter().map(T::encode).collect()),
            text: reason.to_string(),
            members: Vec::new(),
        }
    }
}

/// Whether a parameter may be absent.
#[derive(Clone, Debug, PartialEq)]
pub enum Presence {
    /// The call fails without it.
    Required,
    /// It may be absent; its text says what that means.
    Optional,
    /// Absence means this value.
    Default(Value),
    /// Ringbolt has no choice there, for the reason in the parameter's text: only these values are accepted,
    /// all without effect. Absence means the first.
    Only(Vec<Value>),
    /// Accepted without effect, with a line in the log where it is set; the reason.
    Ignored(&'static str),
}

/// Why a parameter was not accepted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ParameterError {
    code: i64,
    /// Names from the outermost parameter inwards, joined by dots.
    path: String,
    message: String,
}

impl ParameterError {
    /// A value that is not accepted ([`RpcError::INVALID_PARAMS`]).
    pub fn new(message: impl Into<String>) -> ParameterError {
        ParameterError::with_code(RpcError::INVALID_PARAMS, message)
    }

    /// A value that is not accepted, with SPDK's code for it.
    pub fn with_code(code: i64, message: impl Into<String>) -> ParameterError {
        ParameterError { code, path: String::new(), message: message.into() }
    }

    fn within(mut self, name: &str) -> ParameterError {
        let separator = if self.path.is_empty() || self.path.starts_with('[') { "" } else { "." };
        self.path = format!("{name}{separator}{}", self.path);
        self
    }
}

impl From<ParameterError> for RpcError {
    fn from(error: ParameterError) -> RpcError {
        let separator = if error.path.is_empty() { "" } else { ": " };
        let message = format!("{}{separator}{}", error.path, error.message);
        if error.code == RpcError::INVALID_PARAMS {
            return RpcError::invalid_params(message);
        }
        RpcError::new(error.code, message)
    }
}

/// A type of parameter: how it is decoded, written and described.
pub trait ParameterType: Sized {
    /// Type and range for the reference, as "integer, 0 to 255".
    fn kind() -> String;

    /// Decodes a value. The message of an error does not name the parameter: the decoder does.
    fn decode(value: Value, decoder: &mut DecodeLog) -> Result<Self, ParameterError>;

    /// The value as `save_config` writes it; null is left out.
    fn encode(&self) -> Value;

    /// The value of an absent parameter, if it may be absent.
    fn absent() -> Option<Self> {
        None
    }

    /// The members of an object.
    fn members() -> Vec<Parameter> {
        Vec::new()
    }
}

/// The parameters of a method; implemented by [`parameters!`](crate::parameters).
pub trait Parameters: Sized {
    /// The declaration, in order.
    fn declaration() -> Vec<Parameter>;

    /// Decodes an object. An unknown name is an error.
    fn from_object(object: Map<String, Value>, log: &mut DecodeLog) -> Result<Self, ParameterError>;

    /// The parameters as an object that decodes to the same: what `save_config` writes.
    fn to_object(&self) -> Map<String, Value>;

    /// Takes the declared parameters out of an object, in which others stay: for a method whose parameters
    /// are declared in several places.
    fn take_from(object: &mut Map<String, Value>, log: &mut DecodeLog) -> Result<Self, ParameterError> {
        let declared = Self::declaration();
        let own = declared.iter().filter_map(|parameter| object.remove_entry(parameter.name)).collect();
        Self::from_object(own, log)
    }
}

/// What a call set without effect.
#[derive(Debug, Default)]
pub struct DecodeLog {
    ignored: Vec<(&'static str, &'static str)>,
}

impl DecodeLog {
    /// Notes a parameter that is set and has no effect, for `reason`.
    pub fn ignored(&mut self, name: &'static str, reason: &'static str) {
        self.ignored.push((name, reason));
    }

    /// Logs one line for each reason, as `METHOD: a, b ignored: REASON`.
    pub(crate) fn write(&self, method: &str) {
        let mut reasons: Vec<&str> = self.ignored.iter().map(|(_, reason)| *reason).collect();
        reasons.dedup();
        for reason in reasons {
            let of_reason = self.ignored.iter().filter(|(_, other)| *other == reason);
            let names: Vec<&str> = of_reason.map(|(name, _)| *name).collect();
            log::warn!(target: "rpc", "{method}: {} ignored: {reason}", names.join(", "));
        }
    }
}

/// Takes parameters out of an object one by one; used by [`parameters!`](crate::parameters).
#[derive(Debug)]
pub struct Decoder<'a> {
    object: Map<String, Value>,
    log: &'a mut DecodeLog,
}

impl<'a> Decoder<'a> {
    /// Of a call's parameters, or of a member that is an object.
    pub fn new(object: Map<String, Value>, log: &'a mut DecodeLog) -> Decoder<'a> {
        Decoder { object, log }
    }

    fn get<T: ParameterType>(&mut self, name: &str) -> Result<Option<T>, ParameterError> {
        let Some(value) = self.object.remove(name) else { return Ok(None) };
        T::decode(value, self.log).map(Some).map_err(|error| error.within(name))
    }

    /// A parameter without a default.
    pub fn take<T: ParameterType>(&mut self, name: &str) -> Result<T, ParameterError> {
        match self.get(name)?.or_else(T::absent) {
            Some(value) => Ok(value),
            None => Err(ParameterError::new("required, but missing").within(name)),
        }
    }

    /// A parameter with a default.
    pub fn take_or<T: ParameterType>(
        &mut self,
        name: &str,
        default: impl FnOnce() -> T,
    ) -> Result<T, ParameterError> {
        Ok(self.get(name)?.unwrap_or_else(default))
    }

    /// A parameter of which only some values are supported, for `reason`. Null counts as absent.
    pub fn only<T: ParameterType>(
        &mut self,
        name: &str,
        accepted: &[T],
        reason: &str,
    ) -> Result<(), ParameterError> {
        let Some(value) = self.get::<Option<T>>(name)?.flatten().map(|value| value.encode()) else {
            return Ok(());
        };
        let accepted: Vec<Value> = accepted.iter().map(T::encode).collect();
        if accepted.contains(&value) {
            return Ok(());
        }
        let accepted: Vec<String> = accepted.iter().map(Value::to_string).collect();
        let message = format!(
            "{value} is not supported: {reason}; leave it out or set it to {}",
            accepted.join(" or ")
        );
        Err(ParameterError::new(message).within(name))
    }

    /// A parameter without effect. Null, false and 0 count as not set.
    pub fn ignored(&mut self, name: &'static str, reason: &'static str) {
        let unset =
            |value: &Value| matches!(value, Value::Null | Value::Bool(false)) || value == &Value::from(0);
        if self.object.remove(name).is_some_and(|value| !unset(&value)) {
            self.log.ignored(name, reason);
        }
    }

    /// Fails if a parameter is left that is not declared.
    pub fn finish(self, declared: &[&str]) -> Result<(), ParameterError> {
        let Some(name) = self.object.keys().next() else { return Ok(()) };
        let expected = match declared {
            [] => "there are none".to_string(),
            names => format!("expected {}", names.join(", ")),
        };
        let name: String = name.chars().take(64).collect();
        Err(ParameterError::new(format!("unknown parameter; {expected}")).within(&name))
    }
}

/// The name of a parameter whose field is a raw identifier, such as `r#type`. For
/// [`parameters!`](crate::parameters).
#[doc(hidden)]
pub const fn field_name(field: &'static str) -> &'static str {
    match field.as_bytes() {
        [b'r', b'#', ..] => field.split_at(2).1,
        _ => field,
    }
}

/// Declares the parameters of a method, or of an object within them, as a struct.
///
/// A field is `name: Type [unit] = default`; unit and default may be missing, and `Option<T>` may be absent.
/// Its documentation is the text of the reference. `only("reason") { name: Type = value }` accepts a
/// parameter of SPDK with one value and rejects any other, `one_of("reason") { name: Type = [value, …] }`
/// with any of several that make no difference here; `ignored("reason") { name, … }` accepts every value
/// without effect and logs that.
///
/// ```
/// control::parameters! {
///     /// Of `toy_create`.
///     struct CreateToy {
///         /// Name
///         name: String,
///         /// Size
///         num_blocks: u64 ["blocks"] = 64,
///     }
///     only("toys have no metadata") { md_size: u32 = 0 }
///     ignored("toys have no colour") { colour }
/// }
/// use control::Parameters;
/// let object = serde_json::json!({ "name": "T", "md_size": 8 });
/// let object = object.as_object().cloned().unwrap_or_default();
/// let error = CreateToy::from_object(object, &mut Default::default()).err().map(control::RpcError::from);
/// assert_eq!(
///     error.map(|error| error.message).as_deref(),
///     Some(
///         "Invalid parameters: md_size: 8 is not supported: toys have no metadata; leave it out or set \
///          it to 0"
///     )
/// );
/// ```
#[macro_export]
macro_rules! parameters {
    (
        $(#[doc = $struct_text:literal])*
        $vis:vis struct $name:ident {
            $( $(#[doc = $text:literal])* $field_vis:vis $field:ident : $type:ty $([$unit:literal])? $(= $default:expr)? ),* $(,)?
        }
        $(only($only_reason:literal) { $( $only:ident : $only_type:ty = $only_value:expr ),* $(,)? })*
        $(one_of($one_of_reason:literal) {
            $( $one_of:ident : $one_of_type:ty = [$( $one_of_value:expr ),* $(,)?] ),* $(,)?
        })*
        $(ignored($reason:literal) { $( $ignored:ident ),* $(,)? })*
    ) => {
        $(#[doc = $struct_text])*
        $vis struct $name {
            $( $(#[doc = $text])* $field_vis $field: $type, )*
        }

        impl $crate::Parameters for $name {
            #[allow(clippy::vec_init_then_push)]
            fn declaration() -> Vec<$crate::Parameter> {
                #[allow(unused_mut)]
                let mut all: Vec<$crate::Parameter> = vec![$( $crate::Parameter {
                    name: $crate::field_name(stringify!($field)),
                    kind: <$type as $crate::ParameterType>::kind(),
                    unit: $crate::parameters!(@unit $($unit)?),
                    presence: $crate::parameters!(@presence $type $(, $default)?),
                    text: concat!($($text),*).trim().to_string(),
                    members: <$type as $crate::ParameterType>::members(),
                }, )*];
                $($( all.push($crate::Parameter::only::<$only_type>(
                    stringify!($only),
                    &[$only_value],
                    $only_reason,
                )); )*)*
                $($( all.push($crate::Parameter::only::<$one_of_type>(
                    stringify!($one_of),
                    &[$( $one_of_value ),*],
                    $one_of_reason,
                )); )*)*
                $($( all.push($crate::Parameter {
                    name: stringify!($ignored),
                    kind: "any".to_string(),
                    unit: None,
                    presence: $crate::Presence::Ignored($reason),
                    text: String::new(),
                    members: Vec::new(),
                }); )*)*
                all
            }

            fn from_object(
                object: $crate::json::Map<String, $crate::json::Value>,
                log: &mut $crate::DecodeLog,
            ) -> Result<Self, $crate::ParameterError> {
                #[allow(unused_mut)]
                let mut decoder = $crate::Decoder::new(object, log);
                $( let $field = $crate::parameters!(@take decoder, $field, $type $(, $default)?); )*
                $($( decoder.only::<$only_type>(stringify!($only), &[$only_value], $only_reason)?; )*)*
                $($( decoder.only::<$one_of_type>(
                    stringify!($one_of),
                    &[$( $one_of_value ),*],
                    $one_of_reason,
                )?; )*)*
                $($( decoder.ignored(stringify!($ignored), $reason); )*)*
                decoder.finish(&[
                    $( $crate::field_name(stringify!($field)), )*
                    $($( stringify!($only), )*)*
                    $($( stringify!($one_of), )*)*
                    $($( stringify!($ignored), )*)*
                ])?;
                Ok($name { $( $field ),* })
            }

            fn to_object(&self) -> $crate::json::Map<String, $crate::json::Value> {
                #[allow(unused_mut)]
                let mut object = $crate::json::Map::new();
                $(
                    let value = $crate::ParameterType::encode(&self.$field);
                    if !value.is_null() {
                        object.insert($crate::field_name(stringify!($field)).to_string(), value);
                    }
                )*
                object
            }
        }

        impl $crate::ParameterType for $name {
            fn kind() -> String {
                "object".to_string()
            }

            fn decode(
                value: $crate::json::Value,
                log: &mut $crate::DecodeLog,
            ) -> Result<Self, $crate::ParameterError> {
                match value {
                    $crate::json::Value::Object(object) => {
                        <Self as $crate::Parameters>::from_object(object, log)
                    }
                    _ => Err($crate::ParameterError::new("expected an object")),
                }
            }

            fn encode(&self) -> $crate::json::Value {
                $crate::json::Value::Object($crate::Parameters::to_object(self))
            }

            fn members() -> Vec<$crate::Parameter> {
                <Self as $crate::Parameters>::declaration()
            }
        }
    };
    (@unit) => { None };
    (@unit $unit:literal) => { Some($unit) };
    (@typed $type:ty, $value:expr) => {{ let value: $type = $value; value }};
    (@presence $type:ty) => {
        match <$type as $crate::ParameterType>::absent() {
            Some(_) => $crate::Presence::Optional,
            None => $crate::Presence::Required,
        }
    };
    (@presence $type:ty, $default:expr) => {
        $crate::Presence::Default($crate::ParameterType::encode(&$crate::parameters!(@typed $type, $default)))
    };
    (@take $decoder:ident, $field:ident, $type:ty) => {
        $decoder.take::<$type>($crate::field_name(stringify!($field)))?
    };
    (@take $decoder:ident, $field:ident, $type:ty, $default:expr) => {
        $decoder.take_or::<$type>($crate::field_name(stringify!($field)), || $default)?
    };
}

/// Declares an enumeration whose values are names in JSON.
///
/// ```
/// control::choices! {
///     /// What to count.
///     #[derive(Default)]
///     enum Direction {
///         #[default]
///         Read = "read",
///         Write = "write",
///     }
/// }
/// assert_eq!(Direction::default().name(), "read");
/// ```
#[macro_export]
macro_rules! choices {
    (
        $(#[$meta:meta])*
        $vis:vis enum $name:ident {
            $( $(#[$variant_meta:meta])* $variant:ident = $text:literal ),* $(,)?
        }
    ) => {
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        $vis enum $name {
            $( $(#[$variant_meta])* $variant ),*
        }

        impl $name {
            /// The name in JSON.
            #[allow(dead_code)]
            $vis fn name(self) -> &'static str {
                match self {
                    $( $name::$variant => $text ),*
                }
            }
        }

        impl $crate::ParameterType for $name {
            fn kind() -> String {
                [$($text),*].join(", ")
            }

            fn decode(
                value: $crate::json::Value,
                _log: &mut $crate::DecodeLog,
            ) -> Result<Self, $crate::ParameterError> {
                match value.as_str() {
                    $( Some($text) => Ok($name::$variant), )*
                    _ => Err($crate::ParameterError::new(format!(
                        "expected one of {}",
                        [$($text),*].join(", ")
                    ))),
                }
            }

            fn encode(&self) -> $crate::json::Value {
                self.name().into()
            }
        }
    };
}

/// Implements [`ParameterType`] through serde.
macro_rules! serde_types {
    ($( $type:ty, $kind:expr; )*) => {
        $(
            impl ParameterType for $type {
                fn kind() -> String {
                    $kind.to_string()
                }

                fn decode(value: Value, _log: &mut DecodeLog) -> Result<Self, ParameterError> {
                    serde_json::from_value(value).map_err(|error| ParameterError::new(error.to_string()))
                }

                fn encode(&self) -> Value {
                    serde_json::to_value(self).unwrap_or(Value::Null)
                }
            }
        )*
    };
}

serde_types! {
    bool, "boolean";
    String, "string";
    Uuid, "UUID";
    Value, "any";
    f64, "number";
    u8, "integer, 0 to 255";
    u16, "integer, 0 to 65535";
    u32, "integer, 0 to 2^32 - 1";
    u64, "integer, 0 to 2^64 - 1";
    i32, "integer, -2^31 to 2^31 - 1";
}

impl<T: ParameterType> ParameterType for Option<T> {
    fn kind() -> String {
        T::kind()
    }

    fn decode(value: Value, log: &mut DecodeLog) -> Result<Self, ParameterError> {
        if value.is_null() { Ok(None) } else { T::decode(value, log).map(Some) }
    }

    fn encode(&self) -> Value {
        self.as_ref().map_or(Value::Null, T::encode)
    }

    fn absent() -> Option<Self> {
        Some(None)
    }

    fn members() -> Vec<Parameter> {
        T::members()
    }
}

impl<T: ParameterType> ParameterType for Vec<T> {
    fn kind() -> String {
        format!("array of {}", T::kind())
    }

    fn decode(value: Value, log: &mut DecodeLog) -> Result<Self, ParameterError> {
        let Value::Array(values) = value else { return Err(ParameterError::new("expected an array")) };
        let one = |(index, value)| {
            T::decode(value, log).map_err(|error: ParameterError| error.within(&format!("[{index}]")))
        };
        values.into_iter().enumerate().map(one).collect()
    }

    fn encode(&self) -> Value {
        self.iter().map(T::encode).collect()
    }

    fn members() -> Vec<Parameter> {
        T::members()
    }
}

/// A secret by value. `save_config` writes it, and nothing else does.
impl ParameterType for Secret {
    fn kind() -> String {
        String::kind()
    }

    fn decode(value: Value, _log: &mut DecodeLog) -> Result<Self, ParameterError> {
        match value {
            Value::String(text) => Ok(Secret::new(text)),
            // Not with the value: it may be the secret.
            _ => Err(ParameterError::new("expected a string")),
        }
    }

    fn encode(&self) -> Value {
        String::from_utf8_lossy(self.reveal()).into_owned().into()
    }
}

/// A string; some of SPDK's tools send a number instead.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TextOrNumber(pub String);

impl ParameterType for TextOrNumber {
    fn kind() -> String {
        "string or integer, 0 to 65535".to_string()
    }

    fn decode(value: Value, log: &mut DecodeLog) -> Result<Self, ParameterError> {
        match value {
            Value::String(text) => Ok(TextOrNumber(text)),
            value => u16::decode(value, log).map(|number| TextOrNumber(number.to_string())),
        }
    }

    fn encode(&self) -> Value {
        self.0.clone().into()
    }
}

crate::parameters! {
    /// Of a method that takes none.
    pub struct NoParameters {}
}

crate::parameters! {
    /// Of a method that takes the name of an object.
    pub struct ByName {
        /// Name
        pub name: String,
    }
}

/// Decodes the parameters of a call. Absent or null parameters are an empty object.
pub(crate) fn decode<P: Parameters>(params: Value, log: &mut DecodeLog) -> Result<P, RpcError> {
    let object = match params {
        Value::Null => Map::new(),
        Value::Object(object) => object,
        _ => return Err(RpcError::invalid_params("params must be an object")),
    };
    Ok(P::from_object(object, log)?)
}

#[cfg(test)]
mod tests;
