//! SmallBank: accounts with a savings and a checking balance, as FaSST's public code has it (`app/smallbank`).
//!
//! ```text
//! key    | table u8 | 0, 3 bytes | account u32 |    big-endian
//! value  | balance i64 |                            in cents, little-endian
//! ```
//! A unit is an account, and its total is the sum of its balances.
//!
//! Differs from the paper's code: balances are exact cents, where the code has floats.

use farside_systems::txn::Txn;

use super::{Added, Benchmark, Outcome, Stop, below, of_mix, present, row};
use crate::driver::Kinds;
use crate::workload::{Random, unit};

/// SmallBank with this number of accounts.
#[derive(Clone, Copy, Debug)]
pub struct SmallBank {
    accounts: u64,
}

impl SmallBank {
    /// Fraction of the accounts that are hot: 4,000 of 100,000.
    pub const HOT_DATA: f64 = 0.04;
    /// Fraction of the transactions that use hot accounts.
    pub const HOT_SHARE: f64 = 0.9;

    /// Creates the benchmark.
    ///
    /// # Errors
    /// There are fewer accounts than a transfer needs.
    pub fn new(accounts: u64) -> Result<SmallBank, String> {
        if accounts < 2 || accounts > u64::from(u32::MAX) {
            return Err(format!(
                "smallbank moves money between 2 accounts, and there are {accounts}: give 2 or more --records"
            ));
        }
        Ok(SmallBank { accounts })
    }

    /// Number of hot accounts.
    fn hot(&self) -> u64 {
        ((self.accounts as f64 * SmallBank::HOT_DATA) as u64).max(2)
    }

    /// Draws the accounts of a transaction. They differ, and are hot or not together.
    fn accounts<const N: usize>(&self, random: &mut Random) -> [u64; N] {
        let among = if unit(random) < SmallBank::HOT_SHARE { self.hot() } else { self.accounts };
        let mut drawn = [0; N];
        for place in 0..N {
            drawn[place] = below(among, random);
            while drawn[..place].contains(&drawn[place]) {
                drawn[place] = below(among, random);
            }
        }
        drawn
    }
}

/// Shares of the kinds in percent, in the order of `KINDS`.
const MIX: [u64; 6] = [15, 15, 15, 25, 15, 15];
const AMALGAMATE: usize = 0;
const BALANCE: usize = 1;
const DEPOSIT_CHECKING: usize = 2;
const SEND_PAYMENT: usize = 3;
const TRANSACT_SAVINGS: usize = 4;

/// A dollar in cents.
const DOLLAR: i64 = 100;
/// Balance of a new account, of each kind.
const INITIAL: i64 = 1_000_000_000 * DOLLAR;
const DEPOSIT: i64 = DOLLAR + 30;
const PAYMENT: i64 = 5 * DOLLAR;
const SAVING: i64 = 20 * DOLLAR + 20;
const CHECK: i64 = 5 * DOLLAR;
/// What a check costs in addition if the account does not have its amount.
const OVERDRAFT: i64 = DOLLAR;

impl Benchmark for SmallBank {
    const KINDS: Kinds =
        &["amalgamate", "balance", "deposit checking", "send payment", "transact savings", "write check"];

    fn units(&self) -> u64 {
        self.accounts
    }

    fn rows_of_unit(&self) -> u64 {
        2
    }

    /// The rows of an amalgamate.
    fn writes_max(&self) -> u64 {
        3
    }

    fn value_len(&self) -> usize {
        size_of::<i64>()
    }

    fn kind(&self, random: &mut Random) -> usize {
        of_mix(&MIX, random)
    }

    async fn load<T: Txn>(&self, txn: &mut T, account: u64) -> Result<i64, Stop> {
        put(txn, &savings(account), INITIAL)?;
        put(txn, &checking(account), INITIAL)?;
        Ok(2 * INITIAL)
    }

    async fn run<T: Txn>(
        &self,
        txn: &mut T,
        random: &mut Random,
        added: &mut Added,
    ) -> Result<Outcome, Stop> {
        match self.kind(random) {
            AMALGAMATE => {
                let [from, to] = self.accounts(random);
                let keys = [savings(from), checking(from), checking(to)];
                let [saved, checked, received] = balances_to_write(txn, keys).await?;
                put(txn, &keys[0], 0)?;
                put(txn, &keys[1], 0)?;
                put(txn, &keys[2], received + saved + checked)?;
                added.extend([(from, -(saved + checked)), (to, saved + checked)]);
            }
            BALANCE => {
                let [account] = self.accounts(random);
                balances(txn, [savings(account), checking(account)]).await?;
            }
            DEPOSIT_CHECKING => {
                let [account] = self.accounts(random);
                let key = checking(account);
                let [checked] = balances_to_write(txn, [key]).await?;
                put(txn, &key, checked + DEPOSIT)?;
                added.push((account, DEPOSIT));
            }
            SEND_PAYMENT => {
                let accounts = self.accounts::<2>(random);
                let keys = accounts.map(checking);
                let [from, to] = balances_to_write(txn, keys).await?;
                if from < PAYMENT {
                    return Ok(Outcome::Failed);
                }
                put(txn, &keys[0], from - PAYMENT)?;
                put(txn, &keys[1], to + PAYMENT)?;
                added.extend(accounts.into_iter().zip([-PAYMENT, PAYMENT]));
            }
            TRANSACT_SAVINGS => {
                let [account] = self.accounts(random);
                let key = savings(account);
                let [saved] = balances_to_write(txn, [key]).await?;
                put(txn, &key, saved + SAVING)?;
                added.push((account, SAVING));
            }
            _ => {
                let [account] = self.accounts(random);
                let keys = [savings(account), checking(account)];
                txn.fetch_to_write(&[&keys[1]], &[&keys[0]]).await?;
                let [saved, checked] = balances(txn, keys).await?;
                let cost = if saved + checked < CHECK { CHECK + OVERDRAFT } else { CHECK };
                put(txn, &keys[1], checked - cost)?;
                added.push((account, -cost));
            }
        }
        Ok(Outcome::Done)
    }

    async fn audit<T: Txn>(&self, txn: &mut T, account: u64) -> Result<i64, Stop> {
        let [saved, checked] = balances(txn, [savings(account), checking(account)]).await?;
        Ok(saved + checked)
    }
}

fn savings(account: u64) -> [u8; 8] {
    key(1, account)
}

fn checking(account: u64) -> [u8; 8] {
    key(2, account)
}

/// The key of a row. A run has at most 2^32 accounts.
fn key(table: u64, account: u64) -> [u8; 8] {
    (table << 56 | account).to_be_bytes()
}

/// Reads balances that the transaction writes, at the same time.
async fn balances_to_write<const N: usize>(txn: &mut impl Txn, keys: [[u8; 8]; N]) -> Result<[i64; N], Stop> {
    let names: [&[u8]; N] = std::array::from_fn(|place| &keys[place][..]);
    txn.fetch_to_write(&names, &[]).await?;
    balances(txn, keys).await
}

/// Reads balances, at the same time.
async fn balances<const N: usize>(txn: &mut impl Txn, keys: [[u8; 8]; N]) -> Result<[i64; N], Stop> {
    let names: [&[u8]; N] = std::array::from_fn(|place| &keys[place][..]);
    txn.fetch(&names).await?;
    let mut found = [0; N];
    for (balance, key) in found.iter_mut().zip(&keys) {
        *balance = i64::from_le_bytes(present(row(txn, key).await?, key)?);
    }
    Ok(found)
}

fn put(txn: &mut impl Txn, key: &[u8], balance: i64) -> Result<(), Stop> {
    Ok(txn.put(key, &balance.to_le_bytes())?)
}
