//! Puts a value into far memory, reads it back, and replaces it unless another client replaced it first.
//!
//! `cargo run --release -p farside --example hello` runs it against a node in its own process. With a url, such as
//! `-- shm:PATH`, it uses the node at that url.

fn main() -> Result<(), farside::Error> {
    let url = std::env::args().nth(1).unwrap_or_else(|| "local:".into());
    let pool = farside::connect(&url)?; // a memory node
    let kv = pool.open("default")?; // a client of one of its stores: Send + Clone

    kv.put("greeting", "hello").wait()?; // or `.await`, under any executor
    let found = kv.get("greeting").wait()?.expect("it was just stored");
    assert_eq!(found.value, b"hello");

    // Stores only if the key still has the version that was read.
    match kv.compare_and_put("greeting", found.version, "hello again").wait()? {
        Ok(_) => println!("replaced"),
        Err(conflict) => println!("somebody was faster: {:?}", conflict.version),
    }

    let was_there = kv.delete("greeting").wait()?;
    println!("deleted: {was_there}");
    Ok(())
}
