//! Tests of PRISM-TX on real fabrics: results against a model, costs, limits, and concurrent transactions.

use crate::support::kept_txn::{KeptTxn, STORE};
use crate::support::pool::{NODES, Pool, run as run_in};
use crate::support::{Home, run};
use farside_remote::draws::Draws;
use farside_remote::fabric::Ran;
use farside_systems::members::New;
use farside_systems::registry::AnyTxn;
use farside_systems::system::{Options, Sizing};
use farside_systems::txn::prism_tx::KIND;
use farside_systems::txn::retry::{self, Attempts};
use farside_systems::txn::{Txn, TxnError};
use std::future::poll_fn;
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::task::Poll;
use std::time::Duration;

const ACCOUNTS: u64 = 4;
const OPENING: u64 = 1000;

fn home(parameters: &str) -> Home {
    let home = Home::new(64);
    home.create_of(KIND, STORE, 16, parameters);
    home
}

fn account(number: u64) -> [u8; 8] {
    number.to_be_bytes()
}

fn amount(value: Option<&[u8]>) -> u64 {
    u64::from_be_bytes(value.expect("an account has a value").try_into().expect("eight bytes"))
}

/// Moves money between two accounts, as a transaction.
async fn transfer<T: Txn>(txn: &mut T, from: u64, to: u64, sum: u64) -> Result<(), TxnError> {
    let (from, to) = (account(from), account(to));
    txn.fetch(&[&from, &to]).await?;
    let paid = amount(txn.get(&from).await?).checked_sub(sum);
    let Some(paid) = paid else { return Ok(()) };
    let got = amount(txn.get(&to).await?) + sum;
    txn.put(&from, &paid.to_be_bytes())?;
    txn.put(&to, &got.to_be_bytes())
}

/// Returns the sum of all accounts, as a transaction.
async fn total<T: Txn>(txn: &mut T) -> Result<u64, TxnError> {
    let mut sum = 0;
    for number in 0..ACCOUNTS {
        sum += amount(txn.get(&account(number)).await?);
    }
    Ok(sum)
}

fn open_accounts(client: &mut KeptTxn) {
    let opened = client.run(async |txn| {
        txn.begin();
        (0..ACCOUNTS).try_for_each(|number| txn.put(&account(number), &OPENING.to_be_bytes()))?;
        txn.commit().await
    });
    opened.expect("nobody else is there");
}

#[test]
fn a_transaction_reads_its_own_writes_and_others_read_them_after_its_commit() {
    let home = home(r#"{"items":100}"#);
    let (mut one, mut other) = (KeptTxn::open(&home), KeptTxn::open(&home));
    assert_eq!(one.get(b"ada"), None);
    let committed = one.run(async |txn| {
        txn.begin();
        txn.put(b"ada", b"1")?;
        txn.put(b"bob", b"2")?;
        assert_eq!(txn.get(b"ada").await?, Some(&b"1"[..]));
        txn.delete(b"bob")?;
        assert_eq!(txn.get(b"bob").await?, None);
        txn.commit().await
    });
    let version = committed.expect("nobody else is there").version;
    assert_eq!((other.get(b"ada"), other.get(b"bob")), (Some(b"1".to_vec()), None));
    let read = other.run(async |txn| txn.read(b"ada").await.map(|read| read.version));
    assert_eq!(read, Ok(version));
    other.put(b"bob", b"3").expect("nobody else is there");
    one.run(async |txn| {
        txn.begin();
        txn.delete(b"ada")?;
        txn.commit().await
    })
    .expect("nobody else is there");
    assert_eq!((other.get(b"ada"), one.get(b"bob")), (None, Some(b"3".to_vec())));
    one.close();
    other.close();
}

#[test]
fn a_commit_waits_for_a_task_that_has_not_begun_and_fails_without_one() {
    let home = home(r#"{"items":100}"#);
    let options = Options { entropy: 1 << 40, ..Options::NONE };
    let endpoint = home.endpoint();
    let opened = run(&endpoint, AnyTxn::open_in(Rc::clone(&endpoint), 1, STORE, &options));
    let mut txn = opened.expect("an id is free");
    let commit = async |txn: &mut AnyTxn<_>| {
        txn.begin();
        txn.put(b"x", b"1")?;
        txn.commit().await
    };
    assert_eq!(run(&endpoint, commit(&mut txn)), Err(TxnError::NotKept { ran: Ran::No }));
    let mut keeper = txn.keeper();
    let committed = run(&endpoint, async {
        let mut committing = pin!(commit(&mut txn));
        let first = poll_fn(|cx| Poll::Ready(committing.as_mut().poll(cx))).await;
        assert!(first.is_pending(), "nothing carries it out yet");
        poll_fn(|cx| {
            assert!(keeper.as_mut().poll(cx).is_pending(), "the client's task has ended");
            committing.as_mut().poll(cx)
        })
        .await
    });
    assert!(committed.is_ok(), "{committed:?}");
    drop(txn);
    run(&endpoint, keeper);
}

#[test]
fn concurrent_clients_keep_the_banks_sum() {
    for parameters in [r#"{"items":100,"lanes":2}"#, r#"{"items":100,"prepare":"paper"}"#] {
        let home = home(parameters);
        open_accounts(&mut KeptTxn::open(&home));
        std::thread::scope(|scope| {
            for thread in 0..3 {
                let home = &home;
                scope.spawn(move || {
                    let (mut client, mut draws) = (KeptTxn::open(home), Draws(thread));
                    for _ in 0..200 {
                        let (from, by) = (draws.below(ACCOUNTS), 1 + draws.below(ACCOUNTS - 1));
                        let (to, sum) = ((from + by) % ACCOUNTS, draws.below(50));
                        let clock = Rc::clone(&client.endpoint);
                        let moved = client.run(async |txn| {
                            let clock = clock.inner();
                            let moving = async |txn: &mut _| transfer(txn, from, to, sum).await;
                            retry::run(txn, clock, &mut draws, Attempts::UNLIMITED, moving).await
                        });
                        moved.expect("some attempt commits");
                        let clock = Rc::clone(&client.endpoint);
                        let sum = client.run(async |txn| {
                            let clock = clock.inner();
                            let adding = async |txn: &mut _| total(txn).await;
                            retry::run(txn, clock, &mut draws, Attempts::UNLIMITED, adding).await
                        });
                        assert_eq!(sum.map(|(sum, _)| sum), Ok(ACCOUNTS * OPENING));
                    }
                    client.close();
                });
            }
        });
        let mut last = KeptTxn::open(&home);
        assert_eq!(last.run(async |txn| total(txn).await), Ok(ACCOUNTS * OPENING));
        last.close();
    }
}

#[test]
fn a_read_modify_write_takes_three_waves_together_and_four_as_in_the_paper() {
    for (prepare, waves) in [("together", 3), ("paper", 4)] {
        // A long lease: no renewal while a transaction runs.
        let home = home(&format!(r#"{{"items":100,"lease_us":60000000,"prepare":"{prepare}"}}"#));
        let mut client = KeptTxn::open(&home);
        open_accounts(&mut client);
        // The first transaction of a while reserves timestamps.
        client.put(b"x", b"1").expect("nobody else is there");
        for keys in [1, 2] {
            client.endpoint.take();
            let done = client.run(async |txn| {
                txn.begin();
                match keys {
                    1 => {
                        let value = amount(txn.get(&account(0)).await?) + 1;
                        txn.put(&account(0), &value.to_be_bytes())?;
                    }
                    _ => transfer(txn, 0, 1, 1).await?,
                }
                txn.commit().await
            });
            done.expect("nobody else is there");
            let costs = client.endpoint.take();
            assert_eq!((costs.round_trips, costs.requests, costs.calls), (waves, waves, 0), "{costs:?}");
        }
        client.close();
    }
}

#[test]
fn a_transaction_over_two_members_takes_the_waves_of_one() {
    let pool = Pool::start();
    // A long lease: no renewal while a transaction runs.
    let lease = Some(Duration::from_secs(60));
    let sizing = Sizing { items: Some(1000), value_len: 64, lease, ..Sizing::default() };
    let new = New { name: STORE.into(), kind: KIND.into(), sizing, quota: 24 << 20, members: NODES };
    let fabric = pool.create(&new);
    let options = Options { entropy: 77, ..Options::NONE };
    let opened = run_in(&fabric, AnyTxn::open_in(Rc::clone(&fabric), NODES as u32, STORE, &options));
    let mut txn = opened.expect("the store was created");
    let mut keeper = txn.keeper();
    let mut kept = async |operation: Pin<Box<dyn Future<Output = Result<(), TxnError>> + '_>>| {
        let mut operation = operation;
        poll_fn(|cx| {
            assert!(keeper.as_mut().poll(cx).is_pending(), "the client's task has ended");
            operation.as_mut().poll(cx)
        })
        .await
        .expect("nobody else is there");
    };
    run_in(&fabric, async {
        let member = txn.member_of(&account(0));
        let elsewhere = (1..).find(|number| txn.member_of(&account(*number)) != member);
        let elsewhere = elsewhere.expect("accounts lie on all members");
        kept(Box::pin(async {
            txn.begin();
            [0, elsewhere]
                .iter()
                .try_for_each(|number| txn.put(&account(*number), &OPENING.to_be_bytes()))?;
            txn.commit().await.map(drop)
        }))
        .await;
        fabric.take();
        kept(Box::pin(async {
            txn.begin();
            transfer(&mut txn, 0, elsewhere, 1).await?;
            txn.commit().await.map(drop)
        }))
        .await;
        let costs = fabric.take();
        assert_eq!((costs.round_trips, costs.requests, costs.calls), (3, 6, 0), "{costs:?}");
        kept(Box::pin(async {
            txn.begin();
            assert_eq!(amount(txn.get(&account(0)).await?), OPENING - 1);
            assert_eq!(amount(txn.get(&account(elsewhere)).await?), OPENING + 1);
            txn.commit().await.map(drop)
        }))
        .await;
    });
    drop(txn);
    run_in(&fabric, keeper);
}
