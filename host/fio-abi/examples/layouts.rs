//! Prints the layouts that are known of a version of fio, a line each: `layouts fio-3.33`. A test compares
//! them with the headers of that version.

fn main() -> Result<(), String> {
    let name = std::env::args().nth(1).ok_or("usage: layouts fio-3.33")?;
    for (field, bytes) in fio_abi::FioVersion::named(&name)?.layouts() {
        println!("{field} {bytes}");
    }
    Ok(())
}
