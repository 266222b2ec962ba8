use super::*;

fn value(text: &str, units: ExpressionUnits) -> Result<(i64, f64), String> {
    let value = evaluate(text, units).expect("an expression")?;
    Ok((value.integer, value.float))
}

/// Text, integer and fraction, as fio's own `exp/test-expression-parser` prints them.
const OF_FIO: &[(&str, i64, f64)] = &[
    ("(2*8)", 16, 16.0),
    ("( 2 * 8 )", 16, 16.0),
    ("(2)*8", 16, 16.0),
    ("(2*8)k", 16384, 16384.0),
    ("(2*8k)", 16384, 16384.0),
    ("(6/2k)", 3072, 3072.0),
    ("(1+2k)", 2049, 2049.0),
    ("(2^3k)", 8192, 8192.0),
    ("(-2k)", -2048, -2048.0),
    ("(1k+2k)*2", 6144, 6144.0),
    ("(2^10)", 1024, 1024.0),
    ("(2^3^2)", 512, 512.0),
    ("(7%4)", 3, 3.0),
    ("(7%4*2)", 6, 6.0),
    ("(2*7%4)", 6, 6.0),
    ("(2^7%4)", 8, 8.0),
    ("(10-3-2)", 5, 5.0),
    ("(2+3*4)", 14, 14.0),
    ("(12/2/3)", 2, 2.0),
    ("(7/2)", 3, 3.5),
    ("(7/2*2)", 6, 7.0),
    ("(1.5*2)", 3, 3.0),
    ("(1.5*3)", 4, 4.5),
    ("(3*1.5*2)", 8, 9.0),
    ("(3*1.5*2.0)", 9, 9.0),
    ("(.5*8)", 4, 4.0),
    ("(1e3+1)", 1001, 1001.0),
    ("(1.5k)", 1024, 1536.0),
    ("(1.5k*2)", 3072, 3072.0),
    ("(2*1.5k)", 3072, 3072.0),
    ("(0x10+1)", 17, 17.0),
    ("(5-9)", -4, -4.0),
    ("(-(3-5))", 2, 2.0),
    ("(--3)", 3, 3.0),
    ("(2*-3)", -6, -6.0),
    ("(2^0)", 1, 1.0),
    ("(2^-1)", 0, 0.5),
    ("(0^0)", 1, 1.0),
    ("((3))", 3, 3.0),
    ("(2kb)", 2048, 2048.0),
    ("(2MB)", 2 << 20, 2097152.0),
    ("(2mb+1g)", 1075838976, 1075838976.0),
    ("(1t)", 1 << 40, 1099511627776.0),
    ("(1p)", 1 << 50, 1125899906842624.0),
    ("(1/3)", 0, 1.0 / 3.0),
    ("(2.5^2)", 6, 6.25),
    ("(9%5%3)", 1, 1.0),
    ("(-7/2)", -3, -3.5),
    ("(-7%4)", -3, -3.0),
    ("(1-.5)", 0, 0.5),
    ("(1.0/4)", 0, 0.25),
    ("(1/4.0)", 0, 0.25),
];

/// Times in microseconds, from the same program.
const TIMES_OF_FIO: &[(&str, i64)] = &[
    ("(30s*2)", 60_000_000),
    ("(1m)", 60_000_000),
    ("(1+500ms)", 500_001),
    ("(1m+30s)", 90_000_000),
    ("(2h)", 7_200_000_000),
    ("(1d)", 86_400_000_000),
    ("(500us)", 500),
    ("(2*1.5s)", 3_000_000),
    ("(10)s", 10_000_000),
    ("(1.5m)", 60_000_000),
];

#[test]
fn expressions_have_the_values_of_fio() {
    for (text, integer, float) in OF_FIO {
        let found = value(text, ExpressionUnits::Bytes);
        assert!(
            found.as_ref().is_ok_and(|(i, f)| i == integer && (f - float).abs() < 1e-9),
            "{text}: {found:?}"
        );
    }
    for (text, microseconds) in TIMES_OF_FIO {
        let found = evaluate(text, ExpressionUnits::Time).unwrap().unwrap();
        assert_eq!((found.integer, found.has_units), (*microseconds, true), "{text}");
    }
    assert!(!evaluate("(2*30)", ExpressionUnits::Time).unwrap().unwrap().has_units);
}

#[test]
fn what_fio_rejects_or_cannot_compute_is_an_error() {
    for text in [
        "((3)", "(3))", "(3)4", "()", "(", "(2*)", "(*2)", "(2 3)", "(4ki)", "(2x)", "(2*8", "(1+1)%",
        "(100)%",
    ] {
        assert!(value(text, ExpressionUnits::Bytes).is_err(), "{text}");
    }
    // fio goes on with the left operand, or with what a wrapped product leaves.
    for text in
        ["(1/0)", "(7%0)", "(1/0.0)", "(1.5%2)", "(2^64)", "(9p*9p)", "(9223372036854775808)", "(1e30)"]
    {
        assert!(value(text, ExpressionUnits::Bytes).is_err(), "{text}");
    }
    // fio has units of time in sizes, and kib is 1,000 bytes there.
    for text in ["(7s)", "(3ms)", "(4kib)"] {
        assert!(value(text, ExpressionUnits::Bytes).is_err(), "{text}");
    }
    assert!(value("(4k)", ExpressionUnits::Time).is_err());
    assert!(evaluate("2*8", ExpressionUnits::Bytes).is_none());
}

#[test]
fn the_length_and_the_nesting_of_an_expression_are_limited() {
    let nested = |depth: usize| format!("{}1{}", "(".repeat(depth), ")".repeat(depth));
    assert_eq!(value(&nested(60), ExpressionUnits::Bytes), Ok((1, 1.0)));
    for text in [nested(499), format!("({}1)", "-".repeat(900)), format!("(2{})", "^1".repeat(300))] {
        let error = value(&text, ExpressionUnits::Bytes).unwrap_err();
        assert!(error.contains("64 deep"), "{error}");
    }
    let long = format!("(1{})", "+1".repeat(490));
    assert_eq!(value(&long, ExpressionUnits::Bytes), Ok((491, 491.0)));
    let error = value(&format!("(1{})", "+1".repeat(500)), ExpressionUnits::Bytes).unwrap_err();
    assert!(error.contains("1000 characters"), "{error}");
}

#[test]
fn any_text_is_parsed_without_a_panic() {
    let mut random = random::WyRand::new(7);
    let pieces = [
        "(",
        ")",
        "+",
        "-",
        "*",
        "/",
        "^",
        "%",
        "7",
        "0",
        "9223372036854775807",
        ".5",
        "1e3",
        "k",
        "p",
        "ms",
        "é",
        " ",
        "0x",
    ];
    for _ in 0..20_000 {
        let count = random.index(12);
        let text: String = (0..count).map(|_| pieces[random.index(pieces.len())]).collect();
        for units in [ExpressionUnits::Bytes, ExpressionUnits::Time] {
            let _ = evaluate(&format!("({text}"), units);
        }
    }
}
