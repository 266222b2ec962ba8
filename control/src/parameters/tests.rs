use serde_json::json;

use super::*;

crate::choices! {
    enum Colour {
        Red = "red",
        Blue = "blue",
    }
}

crate::parameters! {
    struct Inner {
        nsid: Option<u8>,
        colour: Colour,
    }
    ignored("paint is free") { gloss }
}

crate::parameters! {
    struct Outer {
        /// Name of
        /// the thing
        name: String,
        size: u64 ["bytes"] = 7,
        uuid: Option<Uuid>,
        port: Option<TextOrNumber>,
        inner: Option<Inner>,
        list: Vec<u8> = vec![],
    }
    only("there is no metadata") { md_size: u32 = 0 }
    only("things have no labels") { label: String = String::new() }
    one_of("it is not limited") { limit: u32 = [0, 4096] }
    ignored("there is one pool") { pool, cache }
}

fn parse(params: Value) -> Result<(Outer, DecodeLog), String> {
    let mut log = DecodeLog::default();
    decode(params, &mut log)
        .map(|outer| (outer, log))
        .map_err(|error| format!("{} {}", error.code, error.message))
}

#[test]
fn errors_name_the_parameter() {
    for (params, expected) in [
        (json!({}), "name: required, but missing"),
        (json!({ "name": 5 }), "name: invalid type: integer `5`, expected a string"),
        (json!({ "name": "a", "size": null }), "size: invalid type: null, expected u64"),
        (json!({ "name": "a", "size": -1 }), "size: invalid value: integer `-1`, expected u64"),
        (json!({ "name": "a", "list": [1, 256] }), "list[1]: invalid value: integer `256`, expected u8"),
        (json!({ "name": "a", "inner": 5 }), "inner: expected an object"),
        (json!({ "name": "a", "inner": {} }), "inner.colour: required, but missing"),
        (json!({ "name": "a", "inner": { "colour": "green" } }), "inner.colour: expected one of red, blue"),
        (
            json!({ "name": "a", "inner": { "colour": "red", "x": 1 } }),
            "inner.x: unknown parameter; expected nsid, colour, gloss",
        ),
        (
            json!({ "name": "a", "md_size": 8 }),
            "md_size: 8 is not supported: there is no metadata; leave it out or set it to 0",
        ),
        (
            json!({ "name": "a", "label": "x" }),
            "label: \"x\" is not supported: things have no labels; leave it out or set it to \"\"",
        ),
        (
            json!({ "name": "a", "limit": 1 }),
            "limit: 1 is not supported: it is not limited; leave it out or set it to 0 or 4096",
        ),
        (json!([1]), "params must be an object"),
    ] {
        let error = parse(params.clone()).err().unwrap();
        assert_eq!(error, format!("-32602 Invalid parameters: {expected}"), "{params}");
    }
}

#[test]
fn saved_parameters_decode_to_the_same() {
    let (outer, log) =
        parse(json!({ "name": "a", "port": 4420, "md_size": 0, "label": null, "uuid": null, "limit": 4096,
        "inner": { "colour": "blue", "gloss": 1 }, "pool": true, "cache": 0 }))
        .unwrap();
    assert_eq!(log.ignored, [("gloss", "paint is free"), ("pool", "there is one pool")]);
    let saved = Value::Object(outer.to_object());
    let expected =
        json!({ "name": "a", "size": 7, "port": "4420", "inner": { "colour": "blue" }, "list": [] });
    assert_eq!(saved, expected);
    let (again, log) = parse(saved).unwrap();
    assert_eq!((Value::Object(again.to_object()), log.ignored.len()), (expected, 0));
}

#[test]
fn the_declaration_describes_every_parameter() {
    let all = Outer::declaration();
    let names: Vec<&str> = all.iter().map(|one| one.name).collect();
    assert_eq!(
        names,
        ["name", "size", "uuid", "port", "inner", "list", "md_size", "label", "limit", "pool", "cache"]
    );
    assert_eq!((all[0].text.as_str(), &all[0].presence), ("Name of the thing", &Presence::Required));
    assert_eq!((all[1].unit, &all[1].presence), (Some("bytes"), &Presence::Default(json!(7))));
    assert_eq!((all[4].kind.as_str(), all[4].members.len()), ("object", 3));
    assert_eq!(all[4].members[1].kind, "red, blue");
    assert_eq!(
        (&all[8].presence, &all[10].presence),
        (&Presence::Only(vec![json!(0), json!(4096)]), &Presence::Ignored("there is one pool"))
    );
}

#[test]
fn a_secret_by_value_is_saved_and_no_error_has_it() {
    let mut log = DecodeLog::default();
    let secret = Secret::decode(json!("swordfish"), &mut log).unwrap();
    assert_eq!((secret.encode(), Secret::kind().as_str()), (json!("swordfish"), "string"));
    for other in [json!(7355608), json!(["swordfish"]), json!({ "a": "swordfish" }), Value::Null] {
        let error = RpcError::from(Secret::decode(other, &mut log).unwrap_err());
        assert_eq!(error.message, "Invalid parameters: expected a string");
    }
}
