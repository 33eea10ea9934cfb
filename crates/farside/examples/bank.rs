//! Moves money between accounts by transactions: the sum of all accounts stays the same, whatever fails.
//!
//! `cargo run --release -p farside --example bank` runs it against a node in its own process. With a url, such as
//! `-- shm:PATH`, it uses the node at that url, where any number of such programs may run at the same time.

use farside::{Error, NewStore, Txn};

const STORE: &str = "example-bank";
const ACCOUNTS: u64 = 10;
const OPENING: u64 = 100;

fn main() -> Result<(), Error> {
    let url = std::env::args().nth(1).unwrap_or_else(|| "local:".into());
    let pool = farside::connect(&url)?;
    if !pool.stores()?.iter().any(|store| store.name == STORE) {
        pool.create_store(&NewStore { kind: "prism-tx".into(), ..NewStore::prism_kv(STORE, 16 << 20) })?;
    }
    let mut bank = Txn::open(&pool, STORE)?;

    for n in 0..1000u64 {
        let (from, to, sum) = (account(n % ACCOUNTS), account(n * 7 % ACCOUNTS), n % 20);
        if from == to {
            continue;
        }
        // `run` repeats the transaction if another one was in the way.
        bank.run(|transaction| {
            transaction.fetch_to_write(&[&from, &to], &[])?;
            let [payer, payee] = [amount(&transaction.get(&from)?), amount(&transaction.get(&to)?)];
            if payer < sum {
                return Ok(()); // Nothing is written.
            }
            transaction.put(&from, &(payer - sum).to_be_bytes())?;
            transaction.put(&to, &(payee + sum).to_be_bytes())
        })?;
    }

    let total: u64 = bank.run(|transaction| {
        let accounts: Vec<[u8; 8]> = (0..ACCOUNTS).map(account).collect();
        let keys: Vec<&[u8]> = accounts.iter().map(|account| &account[..]).collect();
        Ok(transaction.get_many(&keys)?.iter().map(amount).sum())
    })?;
    println!("{ACCOUNTS} accounts have {total} in all");
    assert_eq!(total, ACCOUNTS * OPENING);
    Ok(())
}

fn account(number: u64) -> [u8; 8] {
    number.to_be_bytes()
}

/// Amount in the value of an account. An account without a value has its opening amount.
fn amount(value: &Option<Vec<u8>>) -> u64 {
    let bytes = value.as_ref().and_then(|value| value[..].try_into().ok());
    bytes.map_or(OPENING, u64::from_be_bytes)
}
