"""Polynomials that functions are made of: coefficients, lowest first, and errors.

`benchmarks/fit_approximations.py` makes the polynomials called own fits, and prints the errors given here.
"""

# (tanh(x) - x) / x^3 in x^2 on |x| < 0.625: Cephes tanhf (Moshier).
TANH = (-3.33332819422e-1, 1.33314422036e-1, -5.37397155531e-2, 2.06390887954e-2, -5.70498872745e-3)
# (e^r - 1 - r) / r^2 on |r| <= ln(2)/2: Cephes expf (Moshier).
EXP = (5.0000001201e-1, 1.6666665459e-1, 4.1665795894e-2, 8.3334519073e-3, 1.3981999507e-3, 1.9875691500e-4)
# (log(1 + f) - f + f^2 / 2) / f^3 on sqrt(1/2) <= 1 + f < sqrt(2): Cephes logf (Moshier).
LOG = (3.3333331174e-1, -2.4999993993e-1, 2.0000714765e-1, -1.6668057665e-1, 1.4249322787e-1, -1.2420140846e-1,
       1.1676998740e-1, -1.1514610310e-1, 7.0376836292e-2)  # fmt: skip
# (erf(x) - x) / x in x^2 on |x| < 1: Cephes erff (Moshier), whose first coefficient is 1 more.
ERF = (1.28379165726710e-1, -3.761262582423300e-1, 1.128358514861418e-1, -2.685381193529856e-2, 5.188327685732524e-3,
       -8.010193625184903e-4, 7.853861353153693e-5)  # fmt: skip
# -erf(x) / x on |x| < 0.7075: own minimax fit, 5e-9 of erfc(x) off.
ERFC = (-1.1283791065216064, 0.37612417340278625, -0.1128135621547699, 0.026749806478619576, -0.004956061020493507,
        0.0005663267220370471)  # fmt: skip
# x Phi(-x) exp(x^2 / 2), Phi the normal distribution, in (x - a) / (x + 3) for 0.99 <= x <= 14.4: own minimax fit, 6e-9 off. Of
# the first coefficient nothing is lost in f32: a was sought for that.
TAIL_FROM, TAIL_TO = 1.676025390625, 3.0
TAIL = (0.3199808597564697, 0.27389878034591675, -0.3793184757232666, 0.2554440498352051, -0.05921177566051483,
        -0.027270769700407982, 0.012494838796555996, 0.0069593992084264755, -0.004057207144796848)  # fmt: skip
# 2^r on |r| <= 1/2: own minimax fit, 2^-18 off.
EXP2 = (0.9999992847442627, 0.6931217908859253, 0.2402474582195282, 0.055917903780937195, 0.009570103138685226)
# Phi(-x) exp(x^2 / 2) in x / (x + 3) for 0 <= x <= 14.4: own fit, 2.4e-8 off.
UPPER_TO = 3.0
UPPER = (0.5, -1.1968265771865845, 1.0531553030014038, -0.2869650721549988, -0.158797949552536, 0.06233165040612221,
         0.008938766084611416, 0.08414443582296371, -0.0932452529668808, 0.02727009914815426)  # fmt: skip
# log2 of Phi(-x), Phi the normal distribution, for 0 <= x <= 12.99: own fit; its power of 2 is 2^-16.2 off,
# computed in f32 2^-14.9.
LOG2_UPPER = (-0.9999905824661255, -1.1513609886169434, -0.4580640196800232, -0.05449709668755531, 0.008851232938468456,
              -0.0010457664029672742, 8.174929826054722e-05, -3.308319037387264e-06, -3.628631972674157e-08,
              1.1429694524167644e-08, -5.220021082052995e-10, 8.377552991600812e-12)  # fmt: skip
LOG2_UPPER_TO = 12.99  # where it passes -127, below which powers of two are zero
# The same for 0 <= x <= 5.6, past which x Phi(-x) is below the least of f16: own fit, 2^-15 off.
LOG2_UPPER_16 = (-1.000040888786316, -1.1505128145217896, -0.4604986906051636, -0.051824696362018585, 0.007432127837091684,
                 -0.0006510821986012161, 2.5504630684736185e-05)  # fmt: skip
# Coefficients that f16 holds, and where to: own fits. The power of 2 is 2^-8.8 off to 5 and 2^-7.8 to 5.6; that of
# 1 / (1 + e^2u), for the gelu by tanh(u), 2^-7.9.
LOG2_UPPER_8 = (-1.001953125, -1.126953125, -0.49951171875, -0.0292205810546875, 0.0016679763793945312)
LOG2_UPPER_TANH_8 = (-0.998046875, -1.1513671875, -0.492919921875, -0.01068115234375, -0.00635528564453125)
LOG2_UPPER_16_TO, LOG2_UPPER_TANH_8_TO = 5.6015625, 5.0
SQRT_2_OVER_PI = 0.7978845608028654
