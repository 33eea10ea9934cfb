//! `info`: a node, or where this program's settings come from.

use super::store::store_json;
use super::{Done, StoreTarget, human_bytes};
use farside::config::Setting;

/// Show a node, or where this program's settings come from.
#[derive(clap::Args)]
pub(super) struct Info {
    #[command(flatten)]
    target: StoreTarget,
    /// Show every setting and where it comes from instead
    #[arg(long)]
    config: bool,
    /// One JSON object
    #[arg(long)]
    json: bool,
}

impl Info {
    pub(super) fn run(self) -> Done {
        if self.config {
            let settings = self.target.settings()?;
            let none = Setting { value: "none".into(), origin: "built in".into() };
            let told = [
                ("pool", settings.pool),
                ("store", settings.store),
                ("token_file", settings.token_file.unwrap_or_else(|| none.clone())),
                ("tls_ca", settings.tls_ca.unwrap_or(none)),
            ];
            if self.json {
                let object: serde_json::Map<_, _> = told
                    .into_iter()
                    .map(|(name, setting)| {
                        let told = serde_json::json!({ "value": setting.value, "origin": setting.origin });
                        (name.to_owned(), told)
                    })
                    .collect();
                tell!("{}", serde_json::Value::Object(object));
                return Ok(());
            }
            for (name, setting) in told {
                tell!("{name:<12}{}  ({})", setting.value, setting.origin);
            }
            return Ok(());
        }
        let (pool, _) = self.target.connect()?;
        let (info, stores) = (pool.info()?, pool.stores()?);
        if self.json {
            let mut object = serde_json::to_value(&info)?;
            object["stores"] = stores.iter().map(store_json).collect();
            tell!("{object}");
            return Ok(());
        }
        // Columns as wide as the longest name.
        let longest = stores.iter().map(|store| "store ".len() + store.name.len()).max().unwrap_or(0);
        let width = (longest + 2).max(22);
        let rows = [
            ("release", info.version),
            ("process", if info.pid == 0 { "told to admins only".into() } else { info.pid.to_string() }),
            ("memory", human_bytes(info.memory_bytes)),
            ("of no store", human_bytes(info.unassigned_bytes)),
            ("pages", human_bytes(info.page_size)),
            ("sessions", info.sessions.to_string()),
            ("buffers taken back", info.reclaimed_buffers.to_string()),
            ("buffers found lost", info.scanned_buffers.to_string()),
        ];
        for (name, value) in rows {
            tell!("{name:<width$}{value}");
        }
        let refused = [
            ("no known token", info.refusals.bad_tokens),
            ("greetings locked out", info.refusals.locked_out),
            ("wrong secrets", info.refusals.bad_secrets),
            ("wrong keys", info.refusals.wrong_keys),
            ("chains refused", info.refusals.chains),
            ("questions refused", info.refusals.asks),
            ("packets forged", info.refusals.forged),
            ("packets replayed", info.refusals.replayed),
        ];
        for (name, count) in refused.into_iter().filter(|&(_, count)| count > 0) {
            tell!("{name:<width$}{count}");
        }
        for store in stores {
            let name = format!("store {}", store.name);
            tell!("{name:<width$}{}, {}", store.kind, human_bytes(store.quota));
        }
        Ok(())
    }
}
