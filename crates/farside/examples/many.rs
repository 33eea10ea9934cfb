//! Shares clients between threads, counts in far memory without a lost increment, and keeps many operations in flight.
//!
//! An increment is a read and a write with no other write in between. `compare_and_put` stores only if the key still
//! has the version that was read; otherwise the thread reads again. A plain `put` would lose increments here.
//!
//! `cargo run --release -p farside --example many` runs it against a node in its own process. With a url, such as
//! `-- shm:PATH`, it uses the node at that url: several processes started there share the counter.

use farside::{Client, Error};

const CLIENTS: usize = 2;
const THREADS_PER_CLIENT: usize = 2;
const INCREMENTS_PER_THREAD: u64 = 5_000;
const COUNTER: &str = "example/many/counter";

fn main() -> Result<(), Error> {
    let url = std::env::args().nth(1).unwrap_or_else(|| "local:".into());
    let pool = farside::connect(&url)?;
    // Each client has a thread and a connection of its own; clones of one client share both.
    let clients = (0..CLIENTS).map(|_| pool.open("default")).collect::<Result<Vec<Client>, Error>>()?;

    clients[0].put_if_absent(COUNTER, 0u64.to_be_bytes()).wait()?;
    let before = count(&clients[0])?;
    let retries = std::thread::scope(|scope| {
        let threads: Vec<_> = clients
            .iter()
            .flat_map(|client| (0..THREADS_PER_CLIENT).map(move |_| client.clone()))
            .map(|client| scope.spawn(move || increment_many(&client)))
            .collect();
        threads.into_iter().map(|thread| thread.join().expect("no thread panics")).sum::<Result<u64, Error>>()
    })?;

    let done = (CLIENTS * THREADS_PER_CLIENT) as u64 * INCREMENTS_PER_THREAD;
    let after = count(&clients[0])?;
    println!("{done} increments took the counter from {before} to {after}; {retries} were tried again");
    assert!(after >= before + done, "an increment was lost");

    // Operations that a thread submits before it waits are in flight together.
    let own = std::process::id();
    let keys: Vec<String> = (0..100).map(|n| format!("example/many/{own}/{n}")).collect();
    let puts: Vec<_> = keys.iter().map(|key| clients[0].put(key.as_str(), "x")).collect();
    puts.into_iter().try_for_each(|put| put.wait())?;
    let deletes: Vec<_> = keys.iter().map(|key| clients[1].delete(key.as_str())).collect();
    let deleted = deletes.into_iter().map(|delete| delete.wait()).collect::<Result<Vec<bool>, Error>>()?;
    assert!(deleted.iter().all(|&was_there| was_there), "a client sees every put that completed at another");
    println!("{} keys put by one client, deleted by the other", deleted.len());
    Ok(())
}

/// Runs one thread's share of the increments; returns the number of retries.
fn increment_many(client: &Client) -> Result<u64, Error> {
    (0..INCREMENTS_PER_THREAD).map(|_| increment(client)).sum()
}

/// Adds one to the counter; returns the number of retries.
fn increment(client: &Client) -> Result<u64, Error> {
    let mut retries = 0;
    loop {
        let found = client.get(COUNTER).wait()?.expect("the counter exists");
        let next = number(&found.value) + 1;
        if client.compare_and_put(COUNTER, found.version, next.to_be_bytes()).wait()?.is_ok() {
            return Ok(retries);
        }
        retries += 1;
    }
}

fn count(client: &Client) -> Result<u64, Error> {
    Ok(number(&client.get(COUNTER).wait()?.expect("the counter exists").value))
}

fn number(value: &[u8]) -> u64 {
    u64::from_be_bytes(value.try_into().expect("the counter has eight bytes"))
}
