//! Digits
mod case; mod data; mod network; mod train;
fn main() -> rankgrad::Result<()> {
    let digits = data::load()?;
    for k in 0..2 {
        let case = case::Case::read(std::path::Path::new("tests/golden/digits_mlp.json"), k)?;
        let mut net = network::Network::new(&case)?;
        let t = std::time::Instant::now();
        let h = train::train(&mut net, &case, &digits, |_| {})?;
        for (a, b) in h.iter().zip(&case.history) { println!("{} {} {} {}", a.train_loss, b.train_loss, a.test_accuracy, b.test_accuracy); }
        println!("{:?}", t.elapsed());
    }
    Ok(())
}
