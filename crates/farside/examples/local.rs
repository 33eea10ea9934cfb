//! Uses the client that belongs to one thread: borrows values from its read buffer, and iterates over all keys.
//!
//! `farside::Client` hands each operation to the client's own thread; `farside::local::Client` runs it on the caller's
//! thread.
//!
//! `cargo run --release -p farside --example local` runs it against a node in its own process. With a url, such as
//! `-- shm:PATH`, it uses the node at that url.

use farside::Error;
use farside::local::Client;

const PREFIX: &[u8] = b"example/local/";

fn main() -> Result<(), Error> {
    let url = std::env::args().nth(1).unwrap_or_else(|| "local:".into());
    let pool = farside::connect(&url)?;
    // The client caches the slot addresses of 1000 keys, so that a second put of a key takes one round trip instead of
    // two.
    let mut client = Client::open(&pool, "default")?.with_slot_cache(1000);

    for n in 0..1000u32 {
        client.put(&key(n), &[b'x'; 512][..n as usize % 512])?;
    }
    let item = client.get(&key(700))?.expect("it was just stored");
    println!("key 700 has {} bytes and is install {} of its slot", item.value.len(), item.version.0);

    // The iteration is no snapshot: a key that is present from start to end is visited exactly once, whatever other
    // clients do.
    let (mut keys, mut bytes) = (0, 0);
    let mut cursor = Default::default();
    while client.next(&mut cursor, |key, item| {
        if key.starts_with(PREFIX) {
            (keys, bytes) = (keys + 1, bytes + item.value.len());
        }
    })? {}
    println!("{keys} keys with {bytes} bytes of values");
    assert_eq!(keys, 1000);

    for n in 0..1000 {
        assert!(client.delete(&key(n))?);
    }
    assert!(client.get(&key(700))?.is_none());
    Ok(())
}

fn key(n: u32) -> Vec<u8> {
    [PREFIX, n.to_string().as_bytes()].concat()
}
